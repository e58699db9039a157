"""Scales each batch's loss so that the averaged gradient is exact, and detects the end of a step.

Start with `training_step`, which assembles the parts. `batch_in_hand` has the table of states.
"""
