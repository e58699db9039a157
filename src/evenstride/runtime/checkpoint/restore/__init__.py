"""Find the newest whole checkpoint, and put its state back at any number of ranks.

Start with `restorer`.
"""
