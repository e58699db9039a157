"""The analysis of a run's trace: times, decisions, and which worker waited for which.

Start with `run_timeline`. `top`, the page and the export draw its results.
"""
