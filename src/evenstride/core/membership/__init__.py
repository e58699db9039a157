"""Who belongs to a run, as a table of states and events, and what is remembered of workers.

Start with `member_table`.
"""
