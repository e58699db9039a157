"""Implements the synchronisation modes on one rank.

Start with `synchroniser_factory`, which creates a `synchroniser` for a mode.
"""
