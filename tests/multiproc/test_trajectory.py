"""Promises 2 and 3 on real processes: one trajectory, and every sample exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.loops import audited, augmented
from tests.multiproc.training import relative_error

RUNS = [
    (1, "uniform", 0),
    (2, "uniform", 2),
    (2, "static:5,19", 0),
    (2, "adaptive", 2),
    (3, "adaptive", 0),
    (3, "static:1,20,3", 2),
    (3, "dynamic-batching", 0),
]


def test_samples_and_weights_do_not_depend_on_workers_or_policy(ranks: RankPool) -> None:
    runs = {run: ranks.run(augmented, run[0], run[1], 3, run[2]) for run in RUNS}

    def sets(everywhere: list[Any]) -> list[list[int]]:
        steps = zip(*(steps for steps, _ in everywhere), strict=True)
        return [sorted(index for ids in step for index in ids) for step in steps]

    reference = runs[RUNS[0]]
    for run, everywhere in runs.items():
        assert sets(everywhere) == sets(reference), run
        for _, final in everywhere:
            assert relative_error(final, reference[0][1]) <= 1e-9, run


AUDITS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"policy": "uniform", "num_workers": 0}),
    "in this process": (2, {"policy": "adaptive", "num_workers": 0}),
    "two loader processes": (2, {"policy": "adaptive", "num_workers": 2}),
    "persistent loader processes": (
        2,
        {"policy": "adaptive", "num_workers": 2, "persistent": True},
    ),
    "breaks in mid-epoch": (3, {"policy": "adaptive", "num_workers": 0, "breaks": (2, 3, 7, 11)}),
    "breaks with loader processes": (
        2,
        {"policy": "adaptive", "num_workers": 2, "breaks": (3, 8)},
    ),
    "breaks with persistent loader processes": (
        2,
        {"policy": "adaptive", "num_workers": 2, "persistent": True, "breaks": (3, 8)},
    ),
    "micro-batches": (2, {"policy": "static:20,4", "num_workers": 2, "micro": 5}),
    "a tail smaller than the workers": (3, {"policy": "uniform", "num_workers": 0, "length": 74}),
    "fewer samples than workers": (3, {"policy": "uniform", "num_workers": 0, "length": 2}),
}


@pytest.mark.parametrize("name", AUDITS)
def test_every_sample_is_delivered_exactly_once_per_epoch(ranks: RankPool, name: str) -> None:
    world_size, plan = AUDITS[name]
    length, epochs = plan.get("length", 100), 3

    everywhere = ranks.run(audited, world_size, {**plan, "epochs": epochs})

    counts = _counts(everywhere)
    assert counts == Counter((e, i) for e in range(epochs) for i in range(length))
    assert {mine["len"] for mine in everywhere} == {-(-length // 24)}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 1)])
def test_a_restored_run_goes_on_at_the_same_sample_with_other_workers(
    ranks: RankPool, before: int, after: int
) -> None:
    plan = {"policy": "adaptive", "num_workers": 2, "epochs": 3}

    first = ranks.run(audited, before, {**plan, "stop": 7})
    state = first[0]["state"]
    second = ranks.run(audited, after, {**plan, "num_workers": 0, "state": state})

    assert all(mine["state"] == state for mine in first), "the state is the same on every rank"
    assert (state["epoch"], state["position"], state["step"]) == (1, 48, 7)
    together = _counts(first) + _counts(second)
    assert together == Counter((e, i) for e in range(3) for i in range(100))
    assert max(step for mine in second for _, step, _ in mine["delivered"]) == 15


def _counts(everywhere: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    delivered = [batch for mine in everywhere for batch in mine["delivered"]]
    return Counter((epoch, index) for epoch, _, ids in delivered for index in ids)
