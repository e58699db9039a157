"""Starting the processes of ranks on this machine, watching them, and leaving none behind.

Start with `process_starters`. `rank_environment` has the variables of a rank. Imports no torch, so
that the lab and the tests can start processes before they need it.
"""
