"""Batch norm over ranks with unequal shares is batch norm of one process on the union batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from evenstride.testing import RankPool
from tests.multiproc.norms import (
    CHANNELS,
    Case,
    alone,
    copied,
    differentiated_twice,
    half,
    refused,
    train,
    waits,
)
from tests.multiproc.training import relative_error

UNEQUAL = (3, 13)
CASES = {
    "unequal shares": Case(UNEQUAL),
    "a share of 1": Case((1, 9, 4)),
    "sequences": Case(UNEQUAL, "sequences"),
    "images": Case((1, 5), "images"),
    "volumes": Case((1, 4), "volumes"),
    "an infinite ghost": Case((0, 3, 6)),
    "an infinite ghost of images": Case((4, 0), "images"),
    "a cumulative average": Case(UNEQUAL, norm={"momentum": None}),
    "no weights": Case(UNEQUAL, norm={"affine": False}),
    "nothing tracked": Case(UNEQUAL, norm={"track_running_stats": False}),
    "no buffers from rank 0": Case(UNEQUAL, engine={"broadcast_buffers": False}),
    "a static graph": Case((0, 3, 6), engine={"static_graph": True}),
    "unused parameters": Case(UNEQUAL, engine={"find_unused_parameters": True}, unused=True),
    "gradients as views": Case(
        UNEQUAL, engine={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}
    ),
    "recomputed from saved tensors": Case((0, 3, 6), checkpointed="saved"),
    "recomputed by a backward pass": Case((4, 0), checkpointed="reentrant"),
    "compiled": Case(UNEQUAL, compiled="aot_eager", steps=1),
}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_on_one_process(ranks: RankPool, name: str) -> None:
    case = CASES[name]

    everywhere = ranks.run(train, len(case.shares), case)

    assert worst(everywhere, case) <= 1e-12


@pytest.mark.parametrize("name", ["unequal shares", "an infinite ghost", "images"])
def test_a_mean_of_means_is_noticed(ranks: RankPool, name: str) -> None:
    case = replace(CASES[name], broken=True)

    everywhere = ranks.run(train, len(case.shares), case)

    assert not worst(everywhere, case) <= 0.01


@pytest.mark.parametrize("name", ["a share of 1", "an infinite ghost"])
def test_running_statistics_are_equal_on_all_ranks_bit_for_bit(ranks: RankPool, name: str) -> None:
    case = replace(CASES[name], engine={"broadcast_buffers": False})

    everywhere = ranks.run(train, len(case.shares), case)

    for steps in everywhere[1:]:
        assert [seen["buffers"] for seen in steps] == [seen["buffers"] for seen in everywhere[0]]


def test_single_precision_is_as_good_as_on_one_process(ranks: RankPool) -> None:
    case = Case(UNEQUAL, "images", dtype="float32", offset=300.0, steps=1)
    exactly = replace(case, dtype="float64")

    everywhere = ranks.run(train, 2, case)

    rounding = worst([alone(case)], replace(exactly, shares=(16,)))
    assert worst(everywhere, exactly) <= 4 * rounding
    assert 1e-7 < rounding < 1e-2


@pytest.mark.parametrize("automatic", [True, False], ids=["autocast", "all of it"])
def test_half_precision_keeps_statistics_in_single_precision(
    ranks: RankPool, automatic: bool
) -> None:
    case = Case((2, 9), "images")

    everywhere = ranks.run(half, 2, case, automatic)

    # In torch alone, layers whose parameters are bfloat16 keep their statistics in it as well.
    buffers, values = (1e-6, 2.0**-12) if automatic else (2.0**-8, 2.0**-8)
    plain = everywhere[0][0]
    for key in ("outputs", "inputs"):
        together = list(chain.from_iterable(union[key] for _, union in everywhere))
        assert relative_error(together, plain[key]) <= values
    for _, union in everywhere:
        assert relative_error(union["buffers"], plain["buffers"]) <= buffers


def test_a_step_waits_once_a_layer_each_way_and_evaluation_never(ranks: RankPool) -> None:
    assert ranks.run(waits, 2, CASES["unequal shares"]) == [(6, 3, 0)] * 2


def test_one_value_per_channel_is_refused_on_every_rank_and_changes_nothing(
    ranks: RankPool,
) -> None:
    answers = ranks.run(refused, 2, Case((1, 0)))

    assert answers[0] == answers[1]
    (message,), buffers = answers[0]
    assert "at least 2" in message
    assert "drop_last" in message
    assert buffers == [0.0] * CHANNELS + [1.0] * CHANNELS + [0.0]


def test_a_gradient_of_a_gradient_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(differentiated_twice, 2):
        assert "once_differentiable" in message


def test_a_copy_still_shares_statistics(ranks: RankPool) -> None:
    case = CASES["unequal shares"]

    everywhere = ranks.run(copied, 2, case)

    assert all(buffers == everywhere[0][0] for pair in everywhere for buffers in pair)


def worst(everywhere: list[list[dict[str, list[float]]]], case: Case) -> float:
    """Return the largest relative error of anything a rank saw, from one process on all samples."""
    errors = []
    for step, truth in enumerate(alone(case)):
        seen = [steps[step] for steps in everywhere]
        for key, expected in truth.items():
            if key in ("outputs", "inputs"):
                counted = [one[key] for one, n in zip(seen, case.shares, strict=True) if n]
                actual = [list(chain.from_iterable(counted))]
            else:
                actual = [one[key] for one in seen]
            errors += [relative_error(one, expected) for one in actual if expected]
        assert all(one.keys() == truth.keys() for one in seen)
    assert len(errors) >= 3
    return float("nan") if any(e != e for e in errors) else max(errors)
