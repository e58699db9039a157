"""The torch side: timing, loading, loss scaling and commits. `core` decides the shares.

Start with `stride`, the object that scripts use, and `rank_session`, which assembles the parts of
one rank. Imports `core` and `trace`.
"""
