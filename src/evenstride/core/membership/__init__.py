"""The members of a run, as a table of states and events, and stored profiles of workers.

Start with `member_table`.
"""
