"""Ranks that make the same calls in another order all get an error."""

from __future__ import annotations

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.loops import in_another_order


def test_calls_in_another_order_are_refused_alike(ranks: RankPool) -> None:
    reported = ranks.run(in_another_order, 2)

    assert reported[0] == reported[1]
    check_message(reported[0], "RanksDisagree", "rank 0", "watch()")
