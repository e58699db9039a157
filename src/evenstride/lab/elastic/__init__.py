"""Real training processes with scripted faults, restarted after each."""
