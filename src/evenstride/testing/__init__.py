"""Test training code on several processes with `RankPool` or `run_ranks`, and a `FakeClock`.

Start with `ranks`. Scripted faults are in `faults`.
"""

from __future__ import annotations

from evenstride.testing.fake_clock import FakeClock
from evenstride.testing.ranks import RankPool, run_ranks

__all__ = ["FakeClock", "RankPool", "run_ranks"]
