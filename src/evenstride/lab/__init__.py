"""Workers of chosen speed on this machine, for real: CPU limits, calibration, comparison.

Start with `comparison.policy_runs`. May import every package except `cli` and `testing`.
"""
