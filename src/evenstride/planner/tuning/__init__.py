"""Find a configuration while training: what to try next, and when to stop trying.

Start with `online_policy`.
"""
