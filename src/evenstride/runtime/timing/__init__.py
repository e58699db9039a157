"""Measures a rank's steps: its busy time, apart from the time it waits for other ranks.

Start with `step_timer`; `device_timer` does the same for a device that works on a queue.
"""
