"""One training whose workers and batch are found while it goes on: ``evenstride plan --online``.

Start with `online_search`. What to try next is decided in `planner.online_policy`.
"""
