"""What people should know of a run: slow workers, workers that are not needed, lost time.

Start with `alerts` and `ledger`. Decides what to say, never what to do.
"""
