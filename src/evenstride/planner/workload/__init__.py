"""What is known of the training that is planned: step times, links, epochs to the target.

Start with `workload_profile`; `from_trace` fills it from a run's trace.
"""
