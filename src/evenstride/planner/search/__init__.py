"""Look for the clusters that no other beats in time and cost.

Start with `branch_and_bound`; `training_forecast` is what one cluster would take.
"""
