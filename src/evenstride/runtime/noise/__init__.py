"""Measure how noisy a step's gradient is.

Start with `noise_meter`; the statistics are in `core.gradients`.
"""
