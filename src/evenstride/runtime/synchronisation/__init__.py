"""What carries a mode of synchronisation out on one rank.

Start with `synchroniser_factory`, which makes one `synchroniser` from a mode.
"""
