"""What is kept of one run for the next one."""

from __future__ import annotations

import gc

from evenstride.testing import RankPool


def looked_through(rank: int) -> int:
    """Return how many objects a garbage collection looks through."""
    del rank
    return len(gc.get_objects())


def test_modules_are_not_looked_through_after_every_run(ranks: RankPool) -> None:
    ranks.run(looked_through, 2)

    assert max(ranks.run(looked_through, 2)) < 10_000, "torch alone has some 200,000"
