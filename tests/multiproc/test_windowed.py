"""Streams and batch functions: each step's samples independent of the split, gradient exact."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.training import alone_on, relative_error
from tests.multiproc.windowed import BATCH, LENGTH, evaluated, order, refused, train

UNEQUAL = "static:5,19"


def _steps(runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return all ranks' part of every step, of runs that follow each other."""
    return [
        list(parts)
        for results in runs
        for parts in zip(*(t["steps"] for t in results), strict=True)
    ]


def _ids(parts: list[dict[str, Any]]) -> list[int]:
    return [i for part in parts for i in part["ids"]]


def _expected(epochs: int, length: int, *, drop_last: bool = False) -> list[list[int]]:
    """Return the samples of every step, in the order of the stream."""
    end = length - length % BATCH if drop_last else length
    return [
        order(epoch, length)[start : min(start + BATCH, end)]
        for epoch in range(epochs)
        for start in range(0, end, BATCH)
    ]


def _check_gradients(run: list[dict[str, Any]]) -> None:
    steps = _steps([run])
    for parts, truth in zip(steps, alone_on(LENGTH, [_ids(p) for p in steps]), strict=True):
        for part in parts:
            assert relative_error(part["gradient"], truth) <= 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        {"policy": UNEQUAL, "epochs": 2},
        {"policy": UNEQUAL, "epochs": 2, "kind": "bare", "workers": (0, 2)},
        {"policy": "static:0,24", "epochs": 1, "known": True},
        {"policy": "adaptive", "epochs": 3, "workers": (2, 1), "breaks": [3, 4, 12]},
        {"policy": "static:9,15", "epochs": 2, "workers": (3, 2), "breaks": [5], "micro": 4},
        {"policy": "static:9,15", "epochs": 2, "micro": 4, "weighted": True, "drop_last": True},
    ],
    ids=["fixed", "bare", "left out", "adaptive", "micro-batches", "weighted"],
)
def test_a_stream_is_trained_in_its_order_and_the_gradient_is_exact(
    ranks: RankPool, plan: dict[str, Any]
) -> None:
    results = ranks.run(train, 2, plan)

    expected = _expected(plan["epochs"], LENGTH, drop_last=plan.get("drop_last", False))
    assert [_ids(parts) for parts in _steps([results])] == expected
    _check_gradients(results)


@pytest.mark.parametrize("length", [240, 241, 23], ids=["whole steps", "one more", "one step"])
def test_the_end_of_a_stream_is_found_wherever_it_is(ranks: RankPool, length: int) -> None:
    plan = {"policy": UNEQUAL, "epochs": 3, "length": length, "workers": (2, 0)}

    results = ranks.run(train, 2, plan)

    assert [_ids(parts) for parts in _steps([results])] == _expected(3, length)
    assert results[0]["state"]["epoch"] == 3


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stop", [5, 11], ids=["within an epoch", "after its last step"])
def test_a_stream_goes_on_with_any_number_of_ranks(ranks: RankPool, world: int, stop: int) -> None:
    first = ranks.run(train, 2, {"policy": UNEQUAL, "epochs": 2, "stop": stop, "workers": (2, 0)})
    states = [results["steps"][-1]["state"] for results in first]

    rest = ranks.run(train, world, {"policy": "adaptive", "epochs": 2, "state": states[0]})

    assert states[0] == states[1]
    assert [_ids(parts) for parts in _steps([first, rest])] == _expected(2, LENGTH)


def test_augmentation_of_a_stream_does_not_depend_on_the_split(ranks: RankPool) -> None:
    plans: list[dict[str, Any]] = [
        {"policy": policy, "epochs": 1} for policy in (UNEQUAL, "static:20,4")
    ]
    plans[1] |= {"workers": (2, 1), "micro": 3}

    drawn = [
        [[n for part in parts for n in part["drawn"]] for parts in _steps([ranks.run(train, 2, p)])]
        for p in plans
    ]

    assert drawn[0] == drawn[1]
    assert len({n for step in drawn[0] for n in step}) > LENGTH // 2


def test_a_batch_function_draws_the_same_global_batches_for_any_split(ranks: RankPool) -> None:
    plan = {"kind": "function", "policy": UNEQUAL, "max_steps": 9}
    whole = ranks.run(train, 1, {**plan, "policy": "uniform"})
    results = ranks.run(train, 2, {**plan, "workers": (1, 0), "micro": 4, "breaks": [4]})
    first = ranks.run(train, 2, {**plan, "policy": "adaptive", "stop": 4})
    rest = ranks.run(train, 3, {**plan, "policy": "adaptive", "state": first[0]["state"]})

    drawn = [
        [(_ids(parts), [n for part in parts for n in part["drawn"]]) for parts in _steps(runs)]
        for runs in ([whole], [results], [first, rest])
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0]) == 9
    assert len({tuple(ids) for ids, _ in drawn[0]}) == 9, "every step draws another batch"
    _check_gradients(results)


@pytest.mark.parametrize(
    "plan",
    [
        {"policy": UNEQUAL, "workers": (0, 2)},
        {"policy": "static:0,24", "length": 240, "micro": 5},
        {"policy": UNEQUAL, "known": True, "workers": (1, 0)},
    ],
    ids=["unequal", "micro-batches", "known length"],
)
def test_a_stream_can_be_evaluated(ranks: RankPool, plan: dict[str, Any]) -> None:
    results = ranks.run(evaluated, 2, plan)

    ids = sorted(i for first, _ in results for i, _ in first)
    assert ids == list(range(plan.get("length", LENGTH)))
    for first, again in results:
        assert first == again


@pytest.mark.parametrize("how", ["split by rank", "own generator", "function"])
def test_data_that_the_ranks_cannot_share_is_refused(ranks: RankPool, how: str) -> None:
    results = ranks.run(refused, 2, how)

    assert results[0] == results[1]
    check_message(results[0])


def test_random_numbers_of_a_stream_are_equal_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(refused, 2, "seeded") == ["", ""]
