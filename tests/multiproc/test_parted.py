"""partition="epoch": every sample once, each rank's from one stretch, the gradient exact."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.parted import LENGTH, train
from tests.multiproc.training import alone_on, relative_error


def _by_epoch(reported: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    """Return each epoch's samples of each rank, in the order they were trained."""
    epochs: dict[int, list[list[int]]] = {}
    for rank, one in enumerate(reported):
        for step in one["steps"]:
            of_ranks = epochs.setdefault(step["epoch"], [[] for _ in reported])
            of_ranks[rank] += step["ids"]
    return epochs


def _check_epochs(reported: list[dict[str, Any]]) -> None:
    for of_ranks in _by_epoch(reported).values():
        assert sorted(i for mine in of_ranks for i in mine) == list(range(LENGTH))
        for mine in of_ranks:
            assert len(mine) == max(mine) - min(mine) + 1, "one stretch of the data set"


@pytest.mark.parametrize(
    "plan",
    [
        {"policy": "static:5,19", "epochs": 2},
        {"policy": "adaptive", "epochs": 3, "workers": 2},
        {"policy": "adaptive", "epochs": 2, "breaks": [3, 4, 12]},
    ],
    ids=["fixed", "adaptive", "left and entered again"],
)
def test_every_sample_once_and_the_gradient_exact(ranks: RankPool, plan: dict[str, Any]) -> None:
    reported = ranks.run(train, 2, plan)

    _check_epochs(reported)
    union = [a["ids"] + b["ids"] for a, b in zip(*(one["steps"] for one in reported), strict=True)]
    for one in reported:
        for step, truth in zip(one["steps"], alone_on(LENGTH, union), strict=True):
            assert relative_error(step["gradient"], truth) <= 1e-12


def test_parts_are_cut_again_in_each_epoch(ranks: RankPool) -> None:
    reported = ranks.run(train, 2, {"policy": "adaptive", "epochs": 3})

    sizes = [[len(mine) for mine in of_ranks] for of_ranks in _by_epoch(reported).values()]
    assert sizes[0][0] == sizes[0][1], "the first epoch has equal parts"
    assert sizes[-1][0] > sizes[-1][1], "the faster rank has the larger part then"


def test_a_run_goes_on_in_mid_epoch_with_as_many_ranks_only(ranks: RankPool) -> None:
    plan = {"policy": "adaptive", "epochs": 2, "stop": 5}
    first = ranks.run(train, 2, plan)
    state = first[0]["state"]

    rest = ranks.run(train, 2, {"policy": "static:3,21", "epochs": 1, "state": state})
    refused = ranks.run(train, 3, {"policy": "adaptive", "epochs": 1, "state": state})

    whole = [{"steps": a["steps"] + b["steps"]} for a, b in zip(first, rest, strict=True)]
    _check_epochs(whole)
    for reported in refused:
        check_message(reported["error"], "2 ranks")
