"""Copy a rank's state aside and write it while training goes on.

Start with `saver`.
"""
