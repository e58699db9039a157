"""With a quantum, every micro-batch of a rank has one shape, whatever the shares become."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.whole import QUANTA, train


@pytest.mark.parametrize("policy", ["uniform", "adaptive", "static:50,46"])
def test_every_micro_batch_is_whole(ranks: RankPool, policy: str) -> None:
    everywhere = ranks.run(train, 2, 96, policy)

    for steps, quantum in zip(everywhere, QUANTA, strict=True):
        assert len(steps) == 24
        assert {size for step in steps for size in step} == {quantum}
    assert all(sum(a) + sum(b) == 96 for a, b in zip(*everywhere, strict=True))


def test_one_rank_takes_the_remainder(ranks: RankPool) -> None:
    everywhere = ranks.run(train, 2, 98, "uniform")

    odd = [
        [size for step in steps for size in step if size != quantum]
        for steps, quantum in zip(everywhere, QUANTA, strict=True)
    ]
    assert sorted(map(len, odd)) == [0, 24], "one micro-batch of one rank in each step"
    assert all(sum(a) + sum(b) == 98 for a, b in zip(*everywhere, strict=True))
