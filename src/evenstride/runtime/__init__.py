"""The torch side: measure, deliver, weigh, commit. `core` decides the shares.

Start with `stride`, the object that scripts talk to, and `rank_session`, which puts one rank's
parts together. Imports `core` and `trace`.
"""
