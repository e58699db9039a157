"""Notice that a rank is gone, name it, and end or go on without it.

Start with `peer_link`; `heartbeat` notices, `failure_report` says.
"""
