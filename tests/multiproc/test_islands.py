"""Islands of HSDP are balanced against each other, exactly, and their ranks stay equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.islands import (
    LENGTH,
    PAIRS,
    Balanced,
    balanced,
    groups,
    kept,
    outside,
    watched,
)
from tests.multiproc.sharded import Layout, alone, needs_shards_on_cpu
from tests.multiproc.training import Loop, relative_error

pytestmark = needs_shards_on_cpu

FLOAT64 = 1e-12

# 130 samples are 3 global batches and a tail of 10.
CASES = {
    "fixed shares": (Loop(40, 130, "static:11,29", steps=8), PAIRS, ()),
    "adaptive": (Loop(40, 130, "adaptive", steps=24), PAIRS, (2, 3)),
    "islands of one rank": (Loop(30, 90, "static:7,23", steps=4), Layout(mesh=(2, 1)), ()),
}
Runs = Callable[[str], list[Balanced]]


@pytest.fixture(scope="module")
def runs(ranks: RankPool) -> Runs:
    """What all ranks saw in each of the cases, run once."""

    @cache
    def run(name: str) -> list[Balanced]:
        loop, layout, slow = CASES[name]
        seen: list[Balanced] = ranks.run(balanced, math.prod(layout.mesh), loop, layout, slow)
        return seen

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_exact_and_an_islands_ranks_have_equal_shares(
    runs: Runs, name: str
) -> None:
    loop, layout, _ = CASES[name]
    size, expected = layout.mesh[-1], alone(loop, layout)

    for seen in runs(name):
        for actual, truth in zip(seen.gradients, expected, strict=True):
            assert relative_error(actual, truth) <= FLOAT64
        assert seen.shares == runs(name)[0].shares
        for shares in seen.shares:
            islands = [shares[at : at + size] for at in range(0, len(shares), size)]
            assert all(max(own) - min(own) <= 1 for own in islands)


def test_a_fixed_split_is_one_of_islands(runs: Runs) -> None:
    full = [shares for shares in runs("fixed shares")[0].shares if sum(shares) == 40]

    assert set(full) == {(6, 5, 15, 14)}


def test_the_island_with_less_work_per_sample_gets_more_of_them(runs: Runs) -> None:
    leader, *others = runs("adaptive")

    full = [shares for shares in leader.shares if sum(shares) == 40]
    assert full[0] == (10,) * 4
    assert sum(sum(shares[:2]) for shares in full) > 1.2 * sum(sum(shares[2:]) for shares in full)
    assert [name.rpartition("/")[2] for name, _ in leader.workers] == ["0-1", "2-3"]
    assert sum(share for _, share in leader.workers) == 40
    assert not any(other.workers for other in others)


def test_one_island_of_all_ranks_keeps_equal_shares_and_says_so(ranks: RankPool) -> None:
    loop = Loop(40, 130, "adaptive", steps=12)

    leader, other = ranks.run(balanced, 2, loop, Layout(mesh=(2,)), (1,))

    assert {shares for shares in leader.shares if sum(shares) == 40} == {(20, 20)}
    check_message(leader.reported[0], "2 ranks")
    assert not other.reported


REFUSED = {
    "none on one rank": "ranks 2-3 on rank 2, but 3 on rank 3",
    "other ones": "ranks 0,2 on rank 2, but 0-1 on rank 0",
    "of two sizes": "1 ranks on some ranks and 3 on others",
    "another rank's": "on rank 2; it must be a process group that this rank is in",
    "a mesh": "got DeviceMesh on rank 0",
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_are_no_islands_are_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    answers = ranks.run(groups, 4, name)

    assert len(set(answers)) == 1
    assert answers[0][0] == "ConfigError"
    assert REFUSED[name] in answers[0][1]
    assert 'shard_group=mesh["shard"].get_group()' in answers[0][1]


def test_shards_outside_the_team_are_refused(ranks: RankPool) -> None:
    answers = ranks.run(outside, 4)

    assert {kind for kind, _ in answers} == {"ConfigError"}
    check_message(answers[0][1], "rank 1")
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]


WATCHED = {
    "HSDP without its groups": ((2, 2), None, ("rank 0",)),
    "HSDP with other groups": ((2, 2), "island", ("rank 0", "ranks 0")),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_model_on_other_islands_is_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    mesh, given, text = WATCHED[name]

    answers = ranks.run(watched, 4, mesh, given)

    assert len(set(answers)) == 1
    assert answers[0][0] == "ConfigError"
    assert "over ranks 0-1" in answers[0][1]
    check_message(answers[0][1], *text)
    assert 'Stride(shard_group=mesh["shard"].get_group())' in answers[0][1]


ACCEPTED = {
    "HSDP with its groups": ((2, 2), "shard"),
    "FSDP over all ranks": ((4,), None),
    "FSDP over all ranks, given": ((4,), "shard"),
    "DDP on islands": ((), "shard"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_sharded_over_the_shard_groups_or_not_at_all_is_watched(
    ranks: RankPool, name: str
) -> None:
    assert ranks.run(watched, 4, *ACCEPTED[name]) == [("", "")] * 4


@pytest.mark.parametrize("how", ["parts", "shards"])
def test_data_that_keeps_to_its_rank_is_trained_once_on_islands(ranks: RankPool, how: str) -> None:
    reported = ranks.run(kept, 4, how)

    for epoch in range(2):
        trained = [index for mine in reported for index in mine[epoch]]
        assert sorted(trained) == list(range(LENGTH))
