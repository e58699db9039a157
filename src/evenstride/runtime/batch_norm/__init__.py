"""Batch norm over the global batch, from mini-batches of unequal size, as one process computes it.

Start with `norm_layers`.
"""
