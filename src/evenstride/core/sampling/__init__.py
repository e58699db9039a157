"""Which samples make up which batch: the order of an epoch, and its partition over workers.

Start with `partition`. Every rank computes the same answer from the position alone.
"""
