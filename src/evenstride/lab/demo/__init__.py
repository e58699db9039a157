"""The whole idea on one machine: really unequal workers train a real model, both ways.

Start with `demo_run`.
"""
