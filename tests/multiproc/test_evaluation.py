"""Evaluation, means, ``drop_last`` and lengths on real processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.evaluating import (
    cut_up,
    dropped,
    evaluated,
    evaluated_while_training,
    means,
)
from tests.order import epoch_order

EVALUATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "equal shares": (2, {"batch": 8, "policy": "uniform", "length": 30}),
    "very unequal shares": (2, {"batch": 12, "policy": "static:1,11", "length": 50}),
    "a share of 0": (3, {"batch": 12, "policy": "static:3,0,9", "length": 50}),
    "fewer samples than workers": (3, {"batch": 12, "policy": "uniform", "length": 2}),
    "a single sample": (2, {"batch": 12, "policy": "static:1,11", "length": 1}),
    "steps smaller than the workers": (
        3,
        {"batch": 12, "policy": "static:2,3,7", "length": 20, "eval_batch": 2},
    ),
    "one large step": (2, {"batch": 4, "policy": "static:1,3", "length": 90, "eval_batch": 1000}),
    "micro-batches": (2, {"batch": 12, "policy": "static:2,10", "length": 50, "micro": 3}),
    "loader processes": (
        2,
        {"batch": 12, "policy": "static:3,9", "length": 50, "num_workers": 2, "micro": 4},
    ),
}


def _ids(everywhere: list[dict[str, Any]]) -> list[int]:
    return sorted(index for mine in everywhere for ids in mine["batches"] for index in ids)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_each_sample_is_evaluated_once_and_the_mean_is_exact(ranks: RankPool, name: str) -> None:
    world_size, plan = EVALUATIONS[name]
    length, batch = plan["length"], plan.get("eval_batch", plan["batch"])

    by_rank = ranks.run(evaluated, world_size, plan)

    for everywhere in zip(*by_rank, strict=True):
        assert _ids(list(everywhere)) == list(range(length)), "none twice, none padded"
        assert {mine["mean"] for mine in everywhere} == {(length - 1) / 2}, "on every rank"
        assert {mine["len"] for mine in everywhere} == {-(-length // batch)}
    assert all(first == second for first, second in by_rank), "a second pass is the same"


def test_evaluation_follows_the_shares(ranks: RankPool) -> None:
    _, plan = EVALUATIONS["very unequal shares"]

    slow, fast = ranks.run(evaluated, 2, plan)

    assert len(_ids(slow[:1])) == 5, "one sample in each of five steps"
    assert len(_ids(fast[:1])) == 45


def test_a_micro_batch_is_never_too_large(ranks: RankPool) -> None:
    _, plan = EVALUATIONS["micro-batches"]

    by_rank = ranks.run(evaluated, 2, plan)

    assert max(len(ids) for mine in by_rank for ids in mine[0]["batches"]) == 3


def test_evaluating_inside_a_run_whose_shares_change_is_exact_each_time(ranks: RankPool) -> None:
    epochs = 12  # long enough for a decision to be made during it
    by_rank = ranks.run(evaluated_while_training, 3, epochs)

    for everywhere in zip(*(mine["passes"] for mine in by_rank), strict=True):
        assert _ids(list(everywhere)) == list(range(50))
        assert {mine["mean"] for mine in everywhere} == {24.5}
    assert len(by_rank[0]["passes"]) == 5 * epochs // 4
    trained = sorted(pair for mine in by_rank for pair in mine["trained"])
    assert trained == [(epoch, index) for epoch in range(epochs) for index in range(120)]
    assert all(mine["shares"] == by_rank[0]["shares"] for mine in by_rank)
    assert len(by_rank[0]["shares"]) > 1, "the shares did change"


@pytest.mark.parametrize(
    ("totals", "counts"),
    [
        ([[1.0, 2.0], [10.0, 20.0]], [3, 8]),
        ([[0.0, 0.0], [7.0, 9.0]], [0, 2]),
        ([[0.1, 1e16], [0.2, 1.0], [0.3, -1e16]], [1, 1, 1]),
        ([[1.0, -1.0]] * 3, [2**24 + 1] * 3),
    ],
)
def test_a_mean_is_that_of_all_samples_and_alike_on_every_rank(
    ranks: RankPool, totals: list[list[float]], counts: list[float]
) -> None:
    answers = ranks.run(means, len(totals), totals, counts)

    assert all(answer == answers[0] for answer in answers)
    one, several = answers[0]
    for column in range(2):
        exact = math.fsum(row[column] for row in totals) / sum(counts)
        scale = max(abs(row[column]) for row in totals) / sum(counts)
        assert several[column] == pytest.approx(exact, rel=1e-15, abs=1e-15 * scale)
    assert one == several[0]


def test_a_mean_over_nothing_is_no_number_on_every_rank(ranks: RankPool) -> None:
    answers = ranks.run(means, 2, [[0.0, 0.0]] * 2, [0, 0])

    assert all(math.isnan(one) and all(map(math.isnan, several)) for one, several in answers)


RUNS = [(1, "uniform"), (2, "static:5,19"), (2, "adaptive"), (3, "uniform"), (3, "static:0,1,23")]


def test_drop_last_leaves_the_same_samples_out_for_any_workers(ranks: RankPool) -> None:
    length, kept, epochs = 125, 120, 2

    for world_size, policy in RUNS:
        by_rank = ranks.run(dropped, world_size, policy, length, epochs)

        for epoch in range(epochs):
            delivered = sorted(index for mine in by_rank for index in mine["ids"][epoch])
            order = epoch_order(9, epoch, length, shuffle=True).tolist()
            assert delivered == sorted(order[:kept]), (world_size, policy)
        assert {mine["dropped"] for mine in by_rank} == {length - kept}
        assert {mine["len"] for mine in by_rank} == {kept // 24}


def test_nothing_is_dropped_where_the_batches_fit(ranks: RankPool) -> None:
    by_rank = ranks.run(dropped, 2, "static:5,19", 96, 1)

    assert {mine["dropped"] for mine in by_rank} == {0}
    assert sorted(index for mine in by_rank for index in mine["ids"][0]) == list(range(96))


@pytest.mark.parametrize(
    ("micro", "batches"), [([None, None], [3, 3]), ([5, 5], [9, 9]), ([3, None], [12, 3])]
)
def test_the_length_is_the_same_on_every_rank_however_it_cuts_its_share(
    ranks: RankPool, micro: list[int | None], batches: list[int]
) -> None:
    by_rank = ranks.run(cut_up, 2, micro)

    assert [mine["batches"] for mine in by_rank] == batches
    assert {mine["len"] for mine in by_rank} == {mine["steps"] for mine in by_rank} == {3}
