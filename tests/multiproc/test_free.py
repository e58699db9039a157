"""Training in which workers do not keep step, on real processes."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evenstride.testing import RankPool
from tests.multiproc.free import Run, idle, train
from tests.multiproc.training import net, relative_error, rows, weights

SLOW = (0, 0, 400)
CASES = {
    "asp": Run("asp", work=SLOW),
    "asp on two servers": Run("asp(servers=2)", policy="static:2,3,7"),
    "asp, prefetching": Run("asp", work=SLOW, processes=1),
    "ssp": Run("ssp(staleness=1)", work=SLOW),
    "ssp, no worker ahead": Run("ssp(staleness=0)", work=SLOW),
    "ssp, moving shares": Run("ssp(staleness=2)", policy="dynamic-batching", work=SLOW),
}


@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_trained_once_in_each_epoch(ranks: RankPool, name: str) -> None:
    run = CASES[name]

    everywhere = ranks.run(train, 3, run)

    for epoch in range(run.epochs):
        seen = Counter(chain.from_iterable(i for one in everywhere for i in one["ids"][epoch]))
        assert seen == Counter(range(run.length))
        assert len({str(one["ends"][epoch]) for one in everywhere}) == 1, "one model at its end"
        split = tuple(sum(map(len, one["ids"][epoch])) for one in everywhere)
        assert [one["splits"][epoch] for one in everywhere] == [split] * 3
    report = everywhere[0]["report"]
    assert report["count"] == sum(len(epoch) for one in everywhere for epoch in one["ids"])
    assert report["handed_out_again"] == 0


def test_a_limit_of_steps_counts_the_samples_of_all(ranks: RankPool) -> None:
    run = Run("asp", length=40, batch=12, most_steps=5, work=SLOW)

    everywhere = ranks.run(train, 3, run)

    seen = [
        Counter(chain.from_iterable(i for one in everywhere for i in one["ids"][epoch]))
        for epoch in range(run.epochs)
    ]
    assert seen[0] == Counter(range(40))
    assert seen[1].total() == 5 * 12 - 40
    assert max(seen[1].values()) == 1
    assert not seen[2]
    for one in everywhere:  # a state from there is one of mid-epoch, as in the other modes
        assert one["places"] == [(1, 1, 0), (1, 1, 20), (1, 1, 20)]


def test_a_rank_that_trains_nothing_counts_the_same_passes(ranks: RankPool) -> None:
    run = Run("asp", length=40, batch=12, policy="static:12,0,0", most_steps=2)

    everywhere = ranks.run(train, 3, run)

    assert [len(list(chain(*one["ids"]))) > 0 for one in everywhere] == [True, False, False]
    assert [one["places"] for one in everywhere] == [everywhere[0]["places"]] * 3


@pytest.mark.alone
def test_asp_is_asynchronous(ranks: RankPool) -> None:
    everywhere = ranks.run(train, 3, Run("asp", length=240, work=(0, 0, 2000)))

    report = everywhere[0]["report"]
    assert report["mean"] > 0
    assert report["most_ahead"] > 2
    updates = [sum(len(epoch) for epoch in one["ids"]) for one in everywhere]
    assert min(updates[:2]) > 1.5 * updates[2]


def test_a_server_knows_that_it_is_needed_while_nothing_is_asked_of_it(ranks: RankPool) -> None:
    assert ranks.run(idle, 2) == [True, True]


@pytest.mark.alone
@pytest.mark.parametrize("bound", [0, 2])
def test_ssp_keeps_its_bound(ranks: RankPool, bound: int) -> None:
    run = Run(f"ssp(staleness={bound})", length=240, work=(0, 0, 1000))

    everywhere = ranks.run(train, 3, run)

    for epoch in range(run.epochs):
        assert _most_ahead([one["times"][epoch] for one in everywhere]) <= bound
    report = everywhere[0]["report"]
    assert report["most_ahead"] == bound + 1, "the fast ones went as far as they may"
    # Every other worker ends at most 2 s + 1 updates while one is made, see
    # `core.sync_modes.async_schedule`.
    assert report["maximum"] <= 2 * (2 * bound + 1)


def _most_ahead(times: list[list[tuple[float, float]]]) -> int:
    """Return by how many updates a worker that began one was ahead of the slowest.

    Seen by the workers' own clocks: an update counts from when it was about to be pushed, so that
    nothing is regarded as a breach by mistake; who made no more in the epoch is not waited for.
    """
    most = 0
    for mine in times:
        for made, (begun_s, _) in enumerate(mine):
            for other in times:
                theirs = sum(pushed_s <= begun_s for _, pushed_s in other)
                if theirs < len(other):
                    most = max(most, made - theirs)
    return most


def test_one_worker_is_sequential_training(ranks: RankPool) -> None:
    run = Run("asp", batch=12, policy="static:12,0")

    one, none = ranks.run(train, 2, run)

    assert not any(none["ids"])
    assert none["ends"] == one["ends"], "also who has trained nothing has the weights"
    assert none["momentum"] == one["momentum"], "and the optimizer's state"
    assert (one["report"]["mean"], one["report"]["maximum"]) == (0.0, 0)
    for mine, expected in zip(one["ends"], _alone(run, one["ids"]), strict=True):
        assert relative_error(mine, expected) <= 1e-12


def _alone(run: Run, epochs: list[list[list[int]]]) -> list[list[float]]:
    """Return the weights of one process at the ends of epochs of given batches."""
    module, data, ends = net(), rows(run.length), []
    # An update weighs as much more as its batch is larger than an equal share, here twice.
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    for batches in epochs:
        for ids in batches:
            _, x, y = data[ids]
            (2 * F.mse_loss(module(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(module))
    return ends
