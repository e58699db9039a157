"""Messages, means and a server over the process group's own key-value store.

Start with `store_channel`. No collectives, so training never waits for these.
"""
