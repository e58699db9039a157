"""What simulated runs are worth: against the oracle, over seeds, as rows of a table.

Start with `suite`.
"""
