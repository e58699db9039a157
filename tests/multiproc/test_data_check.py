"""Data that differs between ranks is refused alike on all of them; data that does not is not."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.alike import accepted, offered, opened, slightly, unequal, untouched

CAUSES = {
    "randn": "random numbers without a seed",
    "noise as pictures": "random numbers without a seed",
    "random_split": "random_split() without a seeded generator",
    "a part by rank": "already split by rank",
    "a part in a list": "already split by rank",
    "shards": "already split by rank",
}


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CAUSES)
def test_data_that_differs_is_refused_with_its_cause(
    ranks: RankPool, name: str, train: bool
) -> None:
    answers = ranks.run(offered, 3, name, train, 0)

    assert answers[0] == answers[1] == answers[2]
    kind, text = answers[0]
    assert kind == "RanksDisagree"
    check_message(text, "sample 0", "rank 1", "rank 0")
    assert CAUSES[name] in text
    assert "check_data=False" in text


def test_worker_processes_make_no_difference(ranks: RankPool) -> None:
    answers = ranks.run(offered, 2, "randn", True, 2)

    assert [kind for kind, _ in answers] == ["RanksDisagree"] * 2


@pytest.mark.parametrize(
    "name",
    [
        "rows",
        "augmented",
        "texts of unequal length",
        "paths",
        "urls",
        "pixels that round differently",
        "noise of its own",
        "the process",
        "failing",
        "local noise, not compared",
    ],
)
def test_data_that_only_seems_to_differ_is_accepted(ranks: RankPool, name: str) -> None:
    for answer, log in ranks.run(accepted, 2, name):
        assert answer == ("", "")
        assert len(log) <= (name == "pixels that round differently")


def test_parts_of_unequal_length_are_named_as_such(ranks: RankPool) -> None:
    one, other = ranks.run(unequal, 2)

    assert one == other
    check_message(one[1], "13", "rank 0", "12")


def test_one_file_that_differs_is_a_warning_of_rank_0(ranks: RankPool) -> None:
    (answer, reported), (other, silent) = ranks.run(slightly, 2)

    assert answer == other == ("", "")
    assert len(reported) == 1
    check_message(reported[0], "rank 1", "rank 0")
    assert silent == []


def test_looking_leaves_no_trace(ranks: RankPool) -> None:
    assert ranks.run(untouched, 2) == [(0, True)] * 2


def test_no_file_is_open_when_worker_processes_start(ranks: RankPool) -> None:
    assert ranks.run(opened, 2) == [0, 0]
