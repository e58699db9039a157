"""Run a script under several policies or modes in turn, and compare them by their traces.

Start with `lab_session`. `paired_ratios` has the statistics.
"""
