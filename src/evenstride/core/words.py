"""Figures as they stand in sentences: the reasons, alerts and summaries that a run tells."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """Return a time with its unit, with one place behind the point.

    >>> time_text(0.0123), time_text(0.99996), time_text(12.34)
    ('12.3 ms', '1000.0 ms', '12.3 s')
    """
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
