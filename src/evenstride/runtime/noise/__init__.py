"""Measures the noise of a step's gradient.

Start with `noise_meter`; the statistics are in `core.gradients`.
"""
