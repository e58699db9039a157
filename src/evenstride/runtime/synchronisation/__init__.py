"""What carries a mode of synchronisation out on one rank.

Start with `mode_runtime`, which makes one `synchroniser` from a mode.
"""
