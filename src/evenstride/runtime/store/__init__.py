"""Messages and a server over the process group's own key-value store; start with `store_channel`.

No collectives, so training never waits for these.
"""
