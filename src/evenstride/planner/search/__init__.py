"""Search for the clusters that no other beats in time and cost.

Start with `branch_and_bound`; `training_forecast` predicts one cluster.
"""
