"""The message if no cluster can train a workload: what binds, and by how much to relax it."""

from __future__ import annotations

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue, Offer, selected
from evenstride.planner.make_plan import MOST_MACHINES, make_plan
from evenstride.planner.search.selection import NothingFits, Wishes
from evenstride.planner.search.training_forecast import Kind
from tests.messages import check_message, raises_message
from tests.unit.planner.kinds import kind, task

SMALL, ROOMY = kind("small", most=4), kind("roomy", workers=2, most=10)


def reported(
    kinds: list[Kind],
    batches: tuple[int, ...],
    most: int,
    wishes: Wishes = Wishes(),  # noqa: B008
) -> str:
    with pytest.raises(NothingFits) as refused:
        make_plan(kinds, task(), wishes, batches, most_machines=most)
    return str(refused.value)


def test_too_little_memory_says_how_many_machines_or_which_batch_would_do() -> None:
    message = reported([SMALL, ROOMY], (310, 512), 8)

    check_message(message, "310", "16", "160")
    assert "--max-nodes 16" in message
    assert make_plan([SMALL, ROOMY], task(), Wishes(), (310,), most_machines=16).found.outlooks
    assert make_plan([SMALL, ROOMY], task(), Wishes(), (160,), most_machines=8).found.outlooks
    assert "needs 15 machines" in reported([SMALL, ROOMY], (300,), 14)


def test_no_more_machines_are_advised_than_may_be_asked_for() -> None:
    enough, too_many = 4 * MOST_MACHINES, 4 * MOST_MACHINES + 1

    assert f"--max-nodes {MOST_MACHINES}" in reported([SMALL], (enough,), 8)
    message = reported([SMALL], (too_many,), 8)
    assert f"needs {MOST_MACHINES + 1} machines" in message
    assert "--max-nodes" not in message
    check_message(message, "32")


def test_a_batch_larger_than_the_data_says_so() -> None:
    with raises_message(ConfigError, "512", "400 samples"):
        make_plan([SMALL], task(samples=400), Wishes(), (512, 1024))


def test_batches_larger_than_the_data_are_named_where_others_are_not() -> None:
    made = make_plan([kind("a")], task(samples=400), Wishes(), (256, 512, 1024))

    named = [one for one in made.caveats if "left out" in one]
    check_message(named, "400 samples", "512", "1024")
    within = make_plan([kind("a")], task(samples=400), Wishes(), (256, 400))
    assert not any("left out" in one for one in within.caveats)


def test_a_batch_smaller_than_the_workers_of_a_machine_says_so() -> None:
    message = reported([kind("big", workers=8), kind("bigger", workers=16)], (4, 7), 8)

    check_message(message, "8 workers")
    assert make_plan([kind("big", workers=8)], task(), Wishes(), (8,)).found.outlooks


def test_machines_that_are_always_taken_away_are_named() -> None:
    assert "plan without --spot" in reported([kind("a", losses_per_h=9000.0)], (256,), 4)


def offers(*some: tuple[str, str]) -> Catalogue:
    made = (Offer(instance_type=name, region=region, usd_per_h=1.0) for name, region in some)
    return Catalogue(tuple(made), (), "prices.csv")


def test_filters_that_leave_nothing_together_are_named() -> None:
    some = offers(("a", "east"), ("b", "west"), ("c", "west"))

    with pytest.raises(ConfigError) as refused:
        selected(some, ["west"], ["a"])
    message = str(refused.value)

    check_message(message, "--types", "--regions")
    assert len(selected(some, ["west"], ["b"]).offers) == 1
    assert len(selected(some).offers) == 3


@pytest.mark.parametrize(("regions", "types"), [(["nord"], []), ([], ["x"])])
def test_a_filter_that_leaves_nothing_alone_is_named(regions: list[str], types: list[str]) -> None:
    with raises_message(ConfigError):
        selected(offers(("a", "east")), regions, types)
