"""Start worker processes, limit them, watch them, and end them all.

Start with `local_launch`. It starts torchrun's agent through `rendezvous`, which binds ports to
loopback only. `torchrun` is for jobs on several machines.
"""
