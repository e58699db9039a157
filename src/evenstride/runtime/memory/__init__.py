"""The memory that batches need, and smaller batches when it runs out.

Start with `oom_retry`, which is ``Stride.guard``.
"""
