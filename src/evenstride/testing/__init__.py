"""Test your own training code on real processes: `RankPool`, `run_ranks`."""

from __future__ import annotations

from evenstride.testing.ranks import RankPool, run_ranks

__all__ = ["RankPool", "run_ranks"]
