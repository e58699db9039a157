"""Measure a rank's steps: its own work apart from waiting for others.

Start with `step_timer`; `device_timer` is the same where a device works on a queue.
"""
