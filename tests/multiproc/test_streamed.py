"""Data in shards: every sample once, the gradient exact, positions kept for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.streamed import BATCH, LENGTH, evaluated, train
from tests.multiproc.training import alone_on, relative_error


def _steps(runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return all ranks' part of every step, of runs that follow each other."""
    return [
        list(parts)
        for reported in runs
        for parts in zip(*(t["steps"] for t in reported), strict=True)
    ]


def _check(runs: list[list[dict[str, Any]]]) -> None:
    """Assert that every epoch has each sample once, and every gradient is that of its union."""
    epochs: dict[int, list[int]] = {}
    union = []
    for parts in _steps(runs):
        ids = [i for part in parts for i in part["ids"]]
        trained = epochs.setdefault(parts[0]["epoch"], [])
        assert len(ids) == min(BATCH, LENGTH - len(trained)), "the global batch stays"
        trained += ids
        union.append(ids)
    for trained in epochs.values():
        assert sorted(trained) == list(range(LENGTH))
    steps = _steps(runs[:1])
    for parts, truth in zip(steps, alone_on(LENGTH, union[: len(steps)]), strict=True):
        for part in parts:
            assert relative_error(part["gradient"], truth) <= 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        {"policy": "static:5,19", "epochs": 2},
        {"policy": "static:0,24", "epochs": 1},
        {"policy": "adaptive", "epochs": 3, "workers": (2, 1)},
        {"policy": "adaptive", "epochs": 2, "breaks": [3, 4, 12]},
        {"policy": "static:9,15", "epochs": 2, "workers": (2, 2), "breaks": [5], "micro": 4},
    ],
    ids=["fixed", "one left out", "loader processes", "left and entered again", "micro-batches"],
)
def test_every_sample_once_and_the_gradient_exact(ranks: RankPool, plan: dict[str, Any]) -> None:
    reported = ranks.run(train, 2, plan)

    _check([reported])
    assert reported[0]["state"]["left"] is None, "an epoch has ended"
    assert "each rank reads some of 6 shards in sequence" in reported[0]["summary"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_goes_on_in_mid_epoch_with_any_number_of_ranks(ranks: RankPool, world: int) -> None:
    plan = {"policy": "adaptive", "epochs": 2, "stop": 5, "workers": (2, 1)}
    first = ranks.run(train, 2, plan)
    states = [reported["state"] for reported in first]

    rest = ranks.run(
        train, world, {"policy": "adaptive", "epochs": 2, "state": states[0], "early": world == 3}
    )

    assert states[0] == states[1]
    assert [len(shards) for shards in states[0]["left"]["open"]] == [2, 1], "one per process"
    _check([first, rest])


def test_augmentation_does_not_depend_on_the_rank_that_reads_a_sample(ranks: RankPool) -> None:
    plans: list[dict[str, Any]] = [
        {"policy": policy, "epochs": 1} for policy in ("static:5,19", "static:20,4")
    ]
    plans[1] |= {"workers": (2, 1)}
    drawn = []
    for plan in plans:
        reported = ranks.run(train, 2, plan)
        steps = [step for one in reported for step in one["steps"]]
        drawn.append({i: r for s in steps for i, r in zip(s["ids"], s["drawn"], strict=True)})

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) > LENGTH // 2


def test_shards_can_be_evaluated(ranks: RankPool) -> None:
    seen = ranks.run(evaluated, 2)

    assert sorted(i for mine in seen for i in mine) == list(range(LENGTH))
