"""Run one script under several policies or modes in turn, and compare them from their traces.

Start with `lab_session`.
"""
