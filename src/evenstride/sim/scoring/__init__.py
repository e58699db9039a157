"""The scores of simulated runs: against the oracle, over seeds, as rows of a table.

Start with `suite`.
"""
