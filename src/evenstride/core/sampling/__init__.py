"""Which samples form which batch: the order of an epoch, and its partition over workers.

Start with `partition`. Every rank computes the same result from the position alone.
"""
