"""How much memory batches take, and smaller batches where it has run out.

Start with `oom_retry`, which is ``Stride.guard``.
"""
