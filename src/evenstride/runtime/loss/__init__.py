"""Scale each batch's loss so that the averaged gradient is exact, and notice the step's end.

Start with `loss_scaling`.
"""
