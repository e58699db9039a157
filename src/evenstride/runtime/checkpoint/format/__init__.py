"""What lies in a checkpoint's folder: manifest, index, tensors, and who may delete them.

Start with `manifest`. Nothing here is a pickle, so loading runs no code.
"""
