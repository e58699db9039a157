"""Between two epochs all ranks do the same, also where they do not keep step, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.testing import RankPool
from tests.multiproc.unaligned import evaluated_between_epochs, saved_by_step

LENGTH, EPOCHS = 50, 4
CASES = {
    "shares that move": ("dynamic-batching", (0, 20, 100)),
    "shares that stay": ("static:2,3,19", (0, 40, 0)),
    "a share of 0": ("static:5,0,19", (0, 0, 20)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_evaluated_once_whatever_steps_the_ranks_are_at(
    ranks: RankPool, name: str
) -> None:
    by_rank = ranks.run(evaluated_between_epochs, 3, *CASES[name], LENGTH, EPOCHS)

    for everywhere in zip(*(mine["passes"] for mine in by_rank), strict=True):
        seen = sorted(i for mine in everywhere for ids in mine["batches"] for i in ids)
        assert seen == list(range(LENGTH))
        assert {mine["mean"] for mine in everywhere} == {(LENGTH - 1) / 2}, "over all, on all"
    assert (len(set().union(*(mine["shares"] for mine in by_rank))) > 1) == (
        name == "shares that move"
    )


def test_evaluation_follows_what_each_rank_has_trained(ranks: RankPool) -> None:
    by_rank = ranks.run(evaluated_between_epochs, 3, *CASES["shares that move"], LENGTH, EPOCHS)

    # Shares of a batch of 24 leave each of the two other ranks at least one sample. Each of the
    # three steps of a pass then rounds by less than one.
    rounding = LENGTH * 2 / 24 + 3
    assert any(
        max(trained) > 120 for trained in zip(*(mine["trained"] for mine in by_rank), strict=True)
    )
    for epoch in range(len(by_rank[0]["trained"])):
        trained = [mine["trained"][epoch] for mine in by_rank]
        counts = [sum(map(len, mine["passes"][epoch + 1]["batches"])) for mine in by_rank]
        assert sum(trained) == 240
        for mine, count in zip(trained, counts, strict=True):
            assert count == pytest.approx(LENGTH * mine / 240, abs=rounding)


@pytest.mark.parametrize(("every", "due"), [(3, True), ("0.001s", True), (1000, False)])
def test_that_step_saves_nothing_is_said_when_it_would(
    ranks: RankPool, tmp_path: Path, every: int | str, due: bool
) -> None:
    one, other = ranks.run(saved_by_step, 2, str(tmp_path), every)

    assert sum("step() does not save" in text for text in one["reported"]) == due
    assert not any("step() does not save" in text for text in other["reported"])
    assert one["saved"] == (0, 1)


def test_notices_are_not_taken_where_a_worker_may_leave_at_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    one, other = ranks.run(saved_by_step, 2, str(tmp_path), 1000)

    assert any("notices=signals has no effect" in text for text in one["reported"])
    assert one["default"] and other["default"], "SIGTERM ends the process, as without us"
