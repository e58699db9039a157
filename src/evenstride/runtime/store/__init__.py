"""Messages between ranks through the process group's key-value store, and a server for a store.

Start with `store_channel`. The messages use no collectives, so training never waits for them.
"""
