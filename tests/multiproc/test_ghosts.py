"""A rank without samples changes nothing, in unusual but legitimate scripts as well."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.ghosts import (
    counted,
    evaluated,
    in_subgroups,
    outsider,
    penalised,
    penalised_alone,
    two_models,
)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "beside"])
def test_a_penalty_counts_once_though_the_tail_leaves_ranks_without_samples(
    ranks: RankPool, inside: bool
) -> None:
    gradients = ranks.run(penalised, 3, inside)

    for actual in gradients:
        for step, alone in zip(actual, penalised_alone(), strict=True):
            assert step == pytest.approx(alone, rel=1e-12, abs=1e-14)


def test_two_models_are_both_silent_on_a_rank_without_samples(ranks: RankPool) -> None:
    sane = ranks.run(two_models, 2, False)
    poisoned = ranks.run(two_models, 2, True)

    assert poisoned == sane


def test_evaluating_with_buffers_waits_for_no_rank_without_a_batch(ranks: RankPool) -> None:
    assert ranks.run(evaluated, 2) == [1.0, 1.0]


def test_groups_of_one_job_may_all_use_weights(ranks: RankPool) -> None:
    one, same, other, too = ranks.run(in_subgroups, 4)

    assert one == same == other == too


def test_a_rank_outside_its_group_gets_an_error(ranks: RankPool) -> None:
    inside, too, outside = ranks.run(outsider, 3)

    assert inside == too == ""
    check_message(outside, "rank 2", "Stride()")


def test_a_script_that_counts_placeholders_is_warned_once(ranks: RankPool) -> None:
    first, *others = ranks.run(counted, 3, False)

    assert first == [], "it trains the sample of the tail"
    assert all(len(lines) == 1 for lines in others)
    check_message(others[0][0], "step 3")
    assert "Use stride.samples" in others[0][0]


def test_a_script_that_reads_its_samples_is_not_warned(ranks: RankPool) -> None:
    assert ranks.run(counted, 3, True) == [[], [], []]
