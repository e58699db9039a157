"""A clock that a test moves."""

from __future__ import annotations


class FakeClock:
    """A clock for tests: calling it returns the time, which passes only by `spend`.

    Args:
        now_s: the time at the start, in seconds.

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
        """Let time pass.

        Args:
            seconds: how much.
        """
        self.now_s += seconds
