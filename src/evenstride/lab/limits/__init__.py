"""Real CPU limits on processes: control groups, or stopping and continuing them.

Start with `cpu_limits`, which chooses between the two and always cleans up.
"""
