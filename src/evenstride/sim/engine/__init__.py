"""Virtual workers, step by step, decided by the same `advance` as in real training.

Start with `lockstep` (``bsp``); `synchronous` and `asynchronous` are the other modes.
"""
