"""Notice that a rank is gone, name it, and end or go on without it.

Start with `peer_link`, which tells the others; `heartbeat` notices.
"""
