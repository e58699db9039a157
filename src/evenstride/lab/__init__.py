"""Local worker processes of chosen speeds: CPU limits, calibration, comparison.

Start with `comparison.lab_session`. May import every package except `cli` and `testing`.
"""
