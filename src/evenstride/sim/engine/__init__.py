"""Virtual workers, step by step, decided by the same `advance` as in real training.

Start with `lockstep` (``bsp``); `mode_runs` and `asynchronous` have the other modes.
"""
