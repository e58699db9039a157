"""Starting, limiting and watching worker processes, and leaving none behind.

Start with `local_launch`. It starts torchrun's agent through `rendezvous`, which
keeps its ports on loopback; `torchrun` is for jobs of several machines.
"""
