"""Reports of a run on itself: records in its trace, and its summary.

Start with `summary`. `run_facts` writes the workload, passes and named means to the trace.
"""
