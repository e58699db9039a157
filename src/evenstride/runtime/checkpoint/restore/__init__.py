"""Finds the newest intact checkpoint, and restores its state with any number of ranks.

Start with `restorer`.
"""
