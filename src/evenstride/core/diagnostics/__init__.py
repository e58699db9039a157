"""What users should know about a run: slow workers, unneeded workers, lost time.

Start with `alerts` and `ledger`. Reports only; decides nothing.
"""
