"""Scale each batch's loss so that the averaged gradient is exact, and notice the step's end.

Start with `training_step`, which puts it together; `step_state` has the table of what may happen.
"""
