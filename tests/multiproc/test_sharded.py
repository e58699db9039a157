"""FSDP2 and HSDP: the gradient is exact, the times are a worker's own, and a state fits any fleet.

Every case of exactness is run a second time with the weighting broken on purpose, and must fail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstride.testing import RankPool
from tests.multiproc.loops import quartile
from tests.multiproc.sharded import (
    Layout,
    Net,
    Run,
    alone,
    doubled,
    evaluated,
    evaluated_alone,
    evaluated_unequally,
    islands,
    needs_shards_on_cpu,
    order_of_callbacks,
    resumed,
    timed,
    train,
    uninterrupted,
)
from tests.multiproc.training import Loop, relative_error, rows

pytestmark = needs_shards_on_cpu

FLOAT64 = 1e-12

ISLANDS = Layout(mesh=(2, 2))
CASES = {
    "two unequal shares": (Loop(30, 90, "static:7,23"), Layout()),
    "parameters kept after forward": (Loop(30, 90, "static:7,23"), Layout(reshard=False)),
    "tied weights": (Loop(30, 90, "static:7,23"), Layout(tied=True)),
    "recomputed activations": (Loop(30, 90, "static:7,23"), Layout(checkpointed=True)),
    "a short last batch": (Loop(30, 70, "static:7,23", steps=4), Layout()),
    "gradient clipping": (Loop(30, 90, "static:7,23", clip=1e-3), Layout()),
    "a share of 0": (Loop(30, 90, "static:0,20,10"), Layout(mesh=(3,))),
    "a share of 0 whose loss is infinite": (
        Loop(30, 90, "static:0,20,10", poison=0),
        Layout(mesh=(3,)),
    ),
    "micro-batches in unequal number": (Loop(16, 48, "static:3,13", micro=4), Layout()),
    "micro-batches with a share of 0": (
        Loop(16, 48, "static:0,3,13", micro=4),
        Layout(mesh=(3,)),
    ),
    "islands, equal inside": (Loop(30, 90, "static:4,4,11,11"), ISLANDS),
    "islands, unequal inside": (Loop(30, 90, "static:1,9,3,17", clip=1e-3), ISLANDS),
    "islands of one rank": (Loop(30, 90, "static:7,23"), Layout(mesh=(2, 1))),
    "micro-batches on islands": (Loop(16, 48, "static:1,5,3,7", micro=2), ISLANDS),
    "a tail smaller than the islands": (Loop(12, 26, "static:1,5,3,3", steps=4), ISLANDS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_union_batch(ranks: RankPool, name: str) -> None:
    loop, layout = CASES[name]

    everywhere = ranks.run(train, math.prod(layout.mesh), loop, layout)

    expected = alone(loop, layout)
    for gradients, _ in everywhere:
        assert len(gradients) == len(expected)
        for actual, truth in zip(gradients, expected, strict=True):
            assert relative_error(actual, truth) <= FLOAT64


@pytest.mark.parametrize("name", CASES)
def test_a_broken_weight_is_noticed(ranks: RankPool, name: str) -> None:
    loop, layout = CASES[name]
    broken = replace(loop, broken=True, poison=None)

    gradients, _ = ranks.run(train, math.prod(layout.mesh), broken, layout)[0]

    worst = max(map(relative_error, gradients, alone(loop, layout)))
    assert not worst <= 1e4 * FLOAT64


def test_single_precision_is_as_exact_as_single_precision(ranks: RankPool) -> None:
    loop, layout = Loop(256, 512, "static:37,219", dtype="float32", steps=2), Layout()

    gradients, _ = ranks.run(train, 2, loop, layout)[0]

    truth = alone(replace(loop, dtype="float64"), layout)
    assert max(map(relative_error, gradients, truth)) <= 1e-5


def test_half_precision_parameters_cost_what_half_precision_costs(ranks: RankPool) -> None:
    loop, layout = Loop(30, 90, "static:7,23", dtype="float32"), Layout(half=True)

    gradients, _ = ranks.run(train, 2, loop, layout)[0]
    equal, _ = ranks.run(train, 2, replace(loop, policy="uniform"), layout)[0]
    broken, _ = ranks.run(train, 2, replace(loop, broken=True), layout)[0]

    truth = alone(loop, layout)
    worst = max(map(relative_error, gradients, truth))
    assert worst <= 2 * max(map(relative_error, equal, truth))
    assert worst <= 8 * 2.0**-8
    assert max(map(relative_error, broken, truth)) > 0.1


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_counting_the_waits_changes_no_bit(ranks: RankPool, mesh: tuple[int, ...]) -> None:
    policy = {(2,): "static:7,23", (2, 2): "static:1,9,3,17"}[mesh]
    run = (train, math.prod(mesh), Loop(30, 90, policy), Layout(mesh=mesh))

    assert ranks.run(*run, True) == ranks.run(*run, False)


TIMED = {
    "in every layer": (Layout(), "static:4,16", {}),
    "gathered ahead": (Layout(), "static:4,16", {"ahead": True}),
    "between islands": (Layout(mesh=(2, 1)), "static:4,16", {}),
    "in and between islands": (Layout(mesh=(2, 2)), "static:2,8,2,8", {}),
}


def _times(
    ranks: RankPool, layout: Layout, policy: str, how: dict[str, bool]
) -> list[tuple[float, list[float]]]:
    measured: list[tuple[float, list[float]]] = ranks.run(
        with_options, math.prod(layout.mesh), timed, policy, layout, how
    )
    return measured


def with_options(rank: int, fn: Any, policy: str, layout: Layout, how: dict[str, bool]) -> Any:
    """Call ``fn`` with keywords."""
    return fn(rank, policy, layout, **how)


@pytest.mark.alone
@pytest.mark.parametrize("name", TIMED)
def test_busy_times_differ_as_the_work_does(ranks: RankPool, name: str) -> None:
    measured = _times(ranks, *TIMED[name])

    (by_little, _), (by_much, _) = measured[0], measured[-1]
    assert by_little <= 1.5 * by_much, "the ratio of busy times is the ratio of work"
    assert min(by_little, by_much) >= 1.0, "no work is regarded as waiting"


@pytest.mark.alone
def test_without_counting_all_ranks_look_equally_busy(ranks: RankPool) -> None:
    layout, policy, _ = TIMED["in every layer"]

    measured = _times(ranks, layout, policy, {"counted": False})

    (by_little, little_s), (by_much, much_s) = measured
    assert by_little > 1.5 * by_much
    off = [abs(little / much - 1.0) for little, much in zip(little_s, much_s, strict=True)]
    assert quartile(off) < 0.3, "in the steps that nothing else disturbs"


def test_a_state_of_four_ranks_goes_on_with_three_and_two(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")

    position, there, after = ranks.run(uninterrupted, 4, folder, "static:2,11,4,7", (3, 4))[0]
    fewer: list[Run] = [
        ranks.run(resumed, 3, folder, "static:9,2,13", 4)[-1],
        ranks.run(resumed, 2, folder, "uniform", 4)[-1],
    ]

    assert position["position"] == 3 * 24
    for position_now, there_now, after_now in fewer:
        assert position_now == position
        assert there_now == there
        for actual, expected in zip(after_now, after, strict=True):
            assert relative_error(actual, expected) <= FLOAT64


@pytest.mark.parametrize("layout", [Layout(), Layout(reshard=False)], ids=["given up", "kept"])
def test_a_rank_may_evaluate_alone(ranks: RankPool, layout: Layout) -> None:
    (never, weights), (outputs, others_weights) = ranks.run(evaluated, 2, layout)

    expected_outputs, expected_weights = evaluated_alone(layout)
    assert not never
    assert weights == others_weights
    assert relative_error(weights, expected_weights) <= FLOAT64
    for actual, expected in zip(outputs, expected_outputs, strict=True):
        assert relative_error(actual, expected) <= FLOAT64


def test_ranks_evaluate_a_sharded_model_in_unequal_numbers_of_batches(ranks: RankPool) -> None:
    (few, one), (many, other) = ranks.run(evaluated_unequally, 2)

    assert few < many
    _, x, y = rows(40).tensors
    truth = float((Net(Layout(), torch.float64)(x) - y).square().mean().detach())
    assert one == other == pytest.approx(truth, rel=1e-12)


def test_a_shard_group_is_the_ranks_that_shard_one_replica(ranks: RankPool) -> None:
    assert ranks.run(islands, 4, Layout(mesh=(4,))) == [(0, 1, 2, 3)] * 4
    assert ranks.run(islands, 4, ISLANDS) == [(0, 1)] * 2 + [(2, 3)] * 2


def test_one_run_does_not_meet_the_groups_of_another_one(ranks: RankPool) -> None:
    for groups in (3, 0):
        assert ranks.run(doubled, 4, groups) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 4


def test_the_last_gradient_is_marked_before_fsdp_waits_for_a_model_that_returns_its_loss(
    ranks: RankPool,
) -> None:
    for seen, gradient, truth in ranks.run(order_of_callbacks, 2):
        assert seen == ["evenstride", "FSDP2"]
        assert gradient == pytest.approx(truth, rel=1e-5)
