"""The times that decide the split are the worker's own, whatever else happens in a step."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.loops import timed

HOWS = (
    "plain",
    "token weights",
    "a user's hook",
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "micro-batches",
    "torch.compile",
    "evaluation and saving",
)


@pytest.mark.alone
@pytest.mark.parametrize("how", HOWS)
def test_injected_work_is_read_back_on_every_rank(ranks: RankPool, how: str) -> None:
    measured = ranks.run(timed, 2, how, [20.0, 60.0])

    for _, part_read in measured:
        assert part_read == pytest.approx(1.0, abs=0.05)
    assert measured[1][0] > 1.5 * measured[0][0], "the ranks' work is one to three"
