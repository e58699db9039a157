"""Workers of chosen speed on this machine, for real: CPU limits, calibration, comparison.

Start with `comparison.lab_session`. May import every package except `cli` and `testing`.
"""
