"""Search for the best workers and batch during a training: ``evenstride plan --online``.

Start with `online_search`. `planner.online_policy` decides which configuration to try next.
"""
