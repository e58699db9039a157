"""Workers of chosen speed on this machine, for real: CPU limits, calibration, comparison."""
