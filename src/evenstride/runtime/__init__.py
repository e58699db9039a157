"""The torch side: measure, deliver, weigh, commit. It decides nothing.

Start with `stride`, the object that scripts talk to, and `rank_session`, which puts one rank's
parts together. Imports `core` and `trace`.
"""
