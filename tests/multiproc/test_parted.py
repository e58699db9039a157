"""partition="epoch": every sample once, each rank's from its own part, the gradient exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstride.core.sampling.permutation import Permutation
from evenstride.testing import RankPool
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
            places = Permutation(LENGTH, 0, 0).position_of(np.array(mine))
            assert len(mine) == np.ptp(places) + 1, "one stretch of the permutation"


@pytest.mark.parametrize(
    "plan",
    [
        {"policy": "static:5,19", "epochs": 2},
        {"policy": "adaptive", "epochs": 3, "workers": 2},
        {"policy": "adaptive", "epochs": 2, "breaks": [3, 4, 12]},
        {"policy": "dbs", "partition": None, "epochs": 3, "workers": 1},
    ],
    ids=["fixed", "adaptive", "left and entered again", "dbs"],
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


@pytest.mark.parametrize("breaks", [[], [11, 22]], ids=["whole loops", "left at the end"])
def test_dbs_decides_at_each_end_of_an_epoch_of_the_data(
    ranks: RankPool, breaks: list[int]
) -> None:
    """Without another option: parts in proportion to the batches, from the first step on."""
    plan = {
        "policy": "dbs",
        "partition": None,
        "epochs": 3,
        "breaks": breaks,
        "times": [1.0, 3.0],
    }

    reported = ranks.run(train, 2, plan)

    _check_epochs(reported)
    full = [
        [len(step["ids"]) for step in reported[0]["steps"] if step["epoch"] == epoch][:-1]
        for epoch in range(3)
    ]
    # 18 and 6 of 24, and then 18 / 1 and 6 / 3 of 20.
    assert full == [[share] * (LENGTH // 24) for share in (12, 18, 22)]
    sizes = [len(of_ranks[0]) for of_ranks in _by_epoch(reported).values()]
    assert all(abs(size - LENGTH * of[0] / 24) <= 1 for size, of in zip(sizes, full, strict=True))


def test_a_run_goes_on_in_mid_epoch_with_as_many_ranks(ranks: RankPool) -> None:
    first = ranks.run(train, 2, {"policy": "adaptive", "epochs": 2, "stop": 5})

    rest = ranks.run(train, 2, {"policy": "static:3,21", "epochs": 1, "state": first[0]["state"]})

    whole = [{"steps": a["steps"] + b["steps"]} for a, b in zip(first, rest, strict=True)]
    _check_epochs(whole)


def test_other_ranks_train_what_the_parts_have_left(ranks: RankPool) -> None:
    """Twice in the same epoch: three ranks, then two."""
    runs = [ranks.run(train, 2, {"policy": "static:5,19", "epochs": 2, "stop": 4})]
    for count, stop in ((3, 3), (2, 10**6)):
        plan = {"policy": "dbs", "epochs": 2, "stop": stop, "state": runs[-1][0]["state"]}
        runs.append(ranks.run(train, count, plan))

    trained = [step for reported in runs for one in reported for step in one["steps"]]
    for epoch in range(2):
        ids = [i for step in trained if step["epoch"] == epoch for i in step["ids"]]
        assert sorted(ids) == list(range(LENGTH))
    assert [len(reported[0]["steps"]) for reported in runs] == [4, 3, 15]
