"""Scale each batch's loss so that the averaged gradient is exact, and notice the step's end.

Start with `training_step`, which puts it together; `batch_in_hand` has the table of states.
"""
