"""What is particular to DDP, FSDP2, devices and compilers.

Start with `watched_model`, which is what ``Stride.watch`` does.
"""
