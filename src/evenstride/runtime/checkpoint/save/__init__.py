"""Copies a rank's state and writes the copy during training.

Start with `checkpoint_writer`; its `Saver` writes in a thread.
"""
