"""How soon spot machines are taken away, and what their loss costs a run.

Start with `preemption_rate`.
"""
