"""A run as a trace for Perfetto and chrome://tracing, with exports of ``torch.profiler``.

Start with `chrome_trace`.
"""
