"""Virtual workers, step by step, with decisions by the same `advance` as in real training.

Start with `lockstep` (``bsp``); `mode_runs` and `asynchronous` have the other modes.
"""
