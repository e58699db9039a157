"""Detect the loss of a rank, report it, and end the run or continue without that rank.

Start with `peer_link`, which reports a loss to the other ranks. `heartbeat` detects it.
"""
