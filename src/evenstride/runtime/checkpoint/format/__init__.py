"""The files of a checkpoint: manifest, index and tensors, and the rules for deleting them.

Start with `manifest`. No file is a pickle, so loading runs no code.
"""
