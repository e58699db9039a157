"""What a run reports about itself: facts for its trace, and the summary at its end.

Start with `summary`; `run_facts` writes to the trace what is known once per run.
"""
