"""The demo: workers of unequal speed train a model with equal and with balanced batches.

Start with `demo_run`.
"""
