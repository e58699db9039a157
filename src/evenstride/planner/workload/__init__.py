"""Knowledge about the training run to plan: step times, links, epochs to the target.

Start with `workload_profile`; `from_trace` creates it from a run's trace.
"""
