"""A clock that a test sets."""

from __future__ import annotations


class FakeClock:
    """A clock for tests. A call returns the time, and only `spend` advances it.

    Args:
        now_s: initial time in seconds.

    >>> clock = FakeClock(100.0)
    >>> clock.spend(0.5)
    >>> clock()
    100.5
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Advance the time.

        Args:
            seconds: duration to advance by.
        """
        self.now_s += seconds
