"""Memory that really ends: the run survives, the gradient is exact, the size is learned."""

from __future__ import annotations

from evenstride.testing import RankPool
from tests.multiproc.scarce import SHARES, STEPS, alone, train
from tests.multiproc.training import relative_error


def test_a_run_survives_the_end_of_memory(ranks: RankPool) -> None:
    first, second = ranks.run(train, 2)

    for reported in (first, second):
        assert len(reported["gradients"]) == STEPS
        for actual, truth in zip(reported["gradients"], alone(), strict=True):
            assert relative_error(actual, truth) <= 1e-12
    opening, short, *later = second["sizes"]
    assert opening == [SHARES[1]]
    assert 0 in short, "memory ended, and the batch did not count"
    for step in later:
        assert max(step) <= SHARES[1] // 2, "the size was learned"
        assert sum(step) == SHARES[1] or 0 in step, "it ended once more, as memory is in pieces"
    assert all(sum(step) == SHARES[0] for step in first["sizes"]), "the others never noticed"
    assert not any(0 in step for step in first["sizes"])
