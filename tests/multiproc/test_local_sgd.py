"""Training on one's own between averages, on real processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from evenstride.testing import RankPool
from tests.multiproc.local_sgd import Ids, Ranks, Run, train
from tests.multiproc.training import relative_error

MOVING = ((7, 16, 7), (15, 0, 15), (0, 0, 30), (1, 28, 1), (10, 10, 10))

LIKE_BSP = {
    "unequal shares": (2, Run("local-sgd(every=1)", epochs=8)),
    "a share of 0": (3, Run("local-sgd(every=1)", "static:7,0,23", epochs=8)),
    "a bare module": (2, Run("local-sgd(every=1)", wrapped=False, epochs=8)),
    "shares that move": (3, Run("local-sgd(every=1)", "uniform", MOVING, epochs=8)),
    "micro-batches": (2, Run("local-sgd(every=1)", micro=4, epochs=8)),
    "by cost in micro-batches": (2, Run("local-sgd(every=1)", micro=60, costs=True, epochs=8)),
    # Linear in the gradient, but each rank's own: shares must stay what they are.
    "momentum": (2, Run("local-sgd(every=1)", momentum=0.9, length=180, epochs=9)),
}


@pytest.mark.parametrize("name", LIKE_BSP)
def test_with_one_step_to_a_round_sgd_is_bsp(ranks: RankPool, name: str) -> None:
    world_size, run = LIKE_BSP[name]

    alone = ranks.run(train, world_size, run)
    reduced = ranks.run(train, world_size, replace(run, sync="bsp", wrapped=True))

    assert len(reduced[0][1]) >= 50
    for (ids, mine), (expected_ids, expected) in zip(alone, reduced, strict=True):
        assert ids == expected_ids
        assert max(map(relative_error, mine, expected)) <= 1e-12
        assert mine == alone[0][1], "an average is the same bytes on all ranks"


CASES = {
    "four steps to a round": (2, Run("local-sgd(every=4)")),
    "shares that move": (3, Run("local-sgd(every=4)", "uniform", MOVING)),
    "a share of 0": (3, Run("local-sgd(every=3)", "static:7,0,23", momentum=0.9)),
    "momentum": (2, Run("local-sgd(every=4)", momentum=0.9)),
    "Adam": (2, Run("local-sgd(every=4)", optimizer="Adam")),
    "a bare module": (2, Run("local-sgd(every=4)", wrapped=False)),
    "micro-batches": (2, Run("local-sgd(every=4)", micro=4)),
    "post-local": (2, Run("local-sgd(every=4,after=10)", momentum=0.9)),
    "post-local, a share of 0": (3, Run("local-sgd(every=2,after=10)", "static:7,0,23")),
    "post-local micro-batches": (2, Run("local-sgd(every=4,after=10)", micro=4)),
    "by cost": (3, Run("local-sgd(every=4,after=3)", "static:7,0,23", costs=True, micro=90)),
    "outer rate": (2, Run("local-sgd(every=4,outer_rate=0.7)")),
    "outer momentum": (
        3,
        Run("local-sgd(every=3,after=5,outer_rate=0.7,outer_momentum=0.9)", "uniform", MOVING),
    ),
    "a step left out": (2, Run("local-sgd(every=4)", infinite=(1, 1))),
    "the first step left out": (
        2,
        Run("local-sgd(every=2,outer_rate=0.7,outer_momentum=0.9)", infinite=(0, 1)),
    ),
    "a whole round left out": (
        2,
        Run("local-sgd(every=1,outer_rate=0.7,outer_momentum=0.9)", infinite=(1, 1)),
    ),
    "a round's last step left out": (2, Run("local-sgd(every=4)", infinite=(3, 0))),
    "left out while averaging gradients": (2, Run("local-sgd(every=4,after=10)", infinite=(4, 1))),
    "speeds that differ": (2, Run("local-sgd(every=4)", "adaptive", uneven=True, epochs=5)),
    "dbs": (2, Run("local-sgd(every=4)", "dbs", thrice=True, epochs=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_one_process_does_for_all_of_them(ranks: RankPool, name: str) -> None:
    world_size, run = CASES[name]

    everywhere = ranks.run(train, world_size, run)

    expected, ends = Ranks(run, world_size).train(_trained(run, everywhere))
    steps = run.steps * run.epochs
    for (_, mine), others in zip(everywhere, expected, strict=True):
        assert len(mine) == steps
        assert max(map(relative_error, mine, others)) <= 1e-12
    alike = [all(mine[s] == everywhere[0][1][s] for _, mine in everywhere) for s in range(steps)]
    after = _after(run)
    assert [s for s in range(steps) if alike[s]] == [*range(after), *ends]


@pytest.mark.parametrize("name", ["shares that move", "micro-batches", "speeds that differ", "dbs"])
def test_every_sample_is_trained_exactly_once_per_epoch(ranks: RankPool, name: str) -> None:
    world_size, run = CASES[name]

    everywhere = ranks.run(train, world_size, run)

    for epoch in range(run.epochs):
        steps = slice(epoch * run.steps, (epoch + 1) * run.steps)
        trained = Counter(i for ids, _ in everywhere for step in ids[steps] for i in step)
        assert trained == Counter(range(run.length))


def test_dbs_moves_its_shares_between_epochs_only(ranks: RankPool) -> None:
    world_size, run = CASES["dbs"]

    (one, _), (other, _) = ranks.run(train, world_size, run)

    # Without the last step of an epoch, which is short.
    epochs = [range(epoch * run.steps, (epoch + 1) * run.steps - 1) for epoch in range(run.epochs)]
    shares = [{(len(one[step]), len(other[step])) for step in steps} for steps in epochs]
    # 22.5 and 7.5 of 30 are rounded up and down, and then 23 / 1 and 7 / 3 are 27.2 and 2.8.
    assert shares == [{(15, 15)}, {(23, 7)}, {(27, 3)}]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("four steps to a round", "weights"),
        ("shares that move", "weights"),
        ("outer momentum", "weights"),
        ("micro-batches", "factor"),
        ("post-local", "factor"),
    ],
)
def test_a_broken_weight_is_noticed(ranks: RankPool, name: str, broken: str) -> None:
    world_size, run = CASES[name]

    everywhere = ranks.run(train, world_size, replace(run, broken=broken))

    expected, _ = Ranks(run, world_size).train([ids for ids, _ in everywhere])
    assert max(map(relative_error, everywhere[0][1], expected[0])) > 1e-6


def _after(run: Run) -> int:
    return Ranks(run, 1).mode.after


def _trained(run: Run, everywhere: list[tuple[Ids, list[list[float]]]]) -> list[Ids]:
    """Return the samples of each rank and step that gave a gradient."""
    ids = [[list(step) for step in mine] for mine, _ in everywhere]
    if run.infinite is not None:
        step, rank = run.infinite
        left_out = range(len(ids)) if step < _after(run) else (rank,)
        for other in left_out:
            ids[other][step] = []
    return ids
