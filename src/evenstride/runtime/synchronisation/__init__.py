"""Implementation of the synchronisation modes on one rank.

Start with `synchroniser_factory`, which makes a `synchroniser` from a mode.
"""
