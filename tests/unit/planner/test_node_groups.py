"""The groups of machines of a cluster, and the command of each."""

import shlex
from collections.abc import Callable

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.launch_files import start_lines
from evenstride.planner.node_groups import (
    LONGEST_JOB_NAME,
    check_job_name,
    launch_line,
    launch_words,
    node_groups,
)
from evenstride.planner.search.training_forecast import ClusterChoice
from tests.messages import raises_message
from tests.unit.planner.kinds import kind

MIXED = ClusterChoice((kind("p4d.24xlarge", workers=8), kind("G5.XLarge!")), (2, 3), 256)
SPOT = ClusterChoice((kind("a", workers=2), kind("b", losses_per_h=0.1)), (1, 2), 256)


def test_groups_have_ranks_one_after_the_other() -> None:
    first, second = node_groups(MIXED)

    assert (first.first, first.count, first.name) == (0, 2, "p4d-24xlarge")
    assert (second.first, second.count, second.name) == (2, 3, "g5-xlarge")


def test_names_are_labels_and_differ() -> None:
    kinds = (kind("a.b"), kind("a-b"), kind("x" * 70), kind("x" * 71), kind("%"))
    names = [group.name for group in node_groups(ClusterChoice(kinds, (1,) * 5, 8))]

    assert names == ["a-b", "a-b-2", "x" * 30, f"{'x' * 28}-4", "type-5"]
    longest = max(map(len, names))
    # <job>-<group>-<job index>-<pod index>-<suffix>, of which Kubernetes takes 63 characters.
    assert LONGEST_JOB_NAME + 1 + longest + len("-0-99") + len("-abcde") <= 63


def test_no_type_gets_the_name_of_another_group() -> None:
    kinds = (kind("Store"), kind("a-b-4"), kind("a-b"), kind("a.b"))
    names = [group.name for group in node_groups(ClusterChoice(kinds, (1,) * 4, 8))]

    assert names == ["store-1", "a-b-4", "a-b", "a-b-5"]


def test_a_type_without_machines_is_refused() -> None:
    with raises_message(ConfigError, "0 machines", "small"):
        node_groups(ClusterChoice((kind("big"), kind("small")), (2, 0), 256))


def by_hand(choice: ClusterChoice) -> list[str]:
    return start_lines(choice, ["t.py"])


@pytest.mark.parametrize("write", [node_groups, by_hand])
def test_a_type_that_would_add_a_line_is_refused(write: Callable[[ClusterChoice], object]) -> None:
    with raises_message(ConfigError, r"'a\nreboot'", "line break"):
        write(ClusterChoice((kind("a\nreboot"), kind("b")), (1, 1), 256))


@pytest.mark.parametrize("name", ["", "Digits", "2nd", "a_b", "a-", "a b", "x" * 21])
def test_names_that_kubernetes_refuses_are_refused(name: str) -> None:
    with raises_message(ConfigError, "--job-name", repr(name)):
        check_job_name(name)


def test_good_names_are_taken() -> None:
    for name in ("a", "digits-2", "x" * LONGEST_JOB_NAME):
        check_job_name(name)


def test_a_machine_runs_launch_with_its_own_workers() -> None:
    both = [launch_words(MIXED, group, "head:1", ["t.py", "a b"]) for group in node_groups(MIXED)]

    usual = ["evenstride", "launch", "--nodes", "5", "--per-node"]
    assert both[0] == [*usual, "8", "--store", "head:1", "t.py", "a b"]
    assert both[1] == [*usual, "1", "--store", "head:1", "t.py", "a b"]


def test_spot_machines_come_and_go() -> None:
    group = node_groups(SPOT)[1]
    words = launch_words(SPOT, group, "s", ["-m", "pkg"])

    assert words[2:] == [
        *("--nodes", "1:3", "--per-node", "1", "--store", "s", "--spot", "--", "-m", "pkg")
    ]
    assert shlex.split(launch_line(SPOT, group, "s", ["-m", "pkg"])) == words
    hosted = launch_line(SPOT, group, '"$head"', ["it's.py"], hosted=True)
    assert "--spot" not in hosted
    assert shlex.split(hosted)[2:] == [
        *("--nodes", "1:3", "--per-node", "1", "--store", "$head", "--restarts", "1000", "it's.py")
    ]
