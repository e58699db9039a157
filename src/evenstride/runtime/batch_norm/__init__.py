"""Batch norm over the union of all ranks' unequal batches, as one process would compute it.

Start with `norm_layers`.
"""
