"""Copy a rank's state aside and write it while training goes on.

Start with `checkpoint_writer`, whose `Saver` is the thread that writes.
"""
