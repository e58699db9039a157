"""A run as a trace for Perfetto and chrome://tracing, beside what ``torch.profiler`` saw of it.

Start with `chrome_trace`.
"""
