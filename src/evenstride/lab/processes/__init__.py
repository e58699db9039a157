"""Starting, limiting and watching worker processes, and leaving none behind.

Start with `local_launch`. `torchrun` and `rendezvous` are for jobs of several machines.
"""
