"""What the page says of runs whose truth is known."""

from __future__ import annotations

import re

import pytest

from evenstride.report.page.findings import cards_of, who_waited
from evenstride.report.wording import duration
from tests.messages import check_message
from tests.unit.report.conftest import Making

CHANGE = (200, (1.0, 0.5, 0.15))


def test_with_equal_shares_the_slowest_worker_is_named(made: Making) -> None:
    run = made(steps=400, policy="uniform", noise=0.01)

    (worst, *_) = who_waited(run)
    check_message(worst)


def test_the_main_figures_begin_with_the_gain(made: Making) -> None:
    run = made(steps=400, noise=0.01)

    assert run.totals.saved_s == pytest.approx(
        run.totals.took_s * (run.totals.speedup_model or 0.0) - run.totals.took_s, rel=0.01
    )
    names = [card.name for card in cards_of(run)]
    assert names[:3] == ["Speed-up over the equal split", "Efficiency", "Time saved"]


def test_a_split_that_costs_time_has_a_figure_of_the_time_lost(made: Making) -> None:
    run = made(steps=60, policy="static:100,100,56", speeds=(1.0, 1.0, 1.0), noise=0.0)

    (lost,) = [card for card in cards_of(run) if card.name.startswith("Time ")]
    assert run.totals.saved_s is not None and run.totals.saved_s < 0
    assert lost.name == "Time lost"
    assert lost.value == duration(-run.totals.saved_s)


def test_a_slow_worker_is_named_with_the_step_even_if_no_worker_waits_for_it(
    made: Making,
) -> None:
    run = made(steps=400, changes=(CHANGE,), noise=0.01)

    (sentence,) = [one for one in who_waited(run) if " ran at " in one]
    found = re.fullmatch(
        r"Worker 2 \(node1/2\) ran at (0\.\d+) of its best speed since step (\d+), "
        r"and its share went from (\d+) to (\d+) samples\.",
        sentence,
    )
    assert found, sentence
    assert float(found.group(1)) == pytest.approx(0.5, abs=0.03)
    assert int(found.group(2)) == 200
    assert int(found.group(3)) > int(found.group(4))


def test_a_slow_stretch_in_the_past_is_reported_with_its_end(made: Making) -> None:
    run = made(steps=600, changes=(CHANGE, (450, (1.0, 0.5, 0.3))), noise=0.01)

    (sentence,) = [one for one in who_waited(run) if " ran at " in one]
    found = re.search(
        r"ran at 0\.\d+ of its best speed in steps (\d+) to (\d+), and its share", sentence
    )
    assert found, sentence
    assert int(found.group(1)) == pytest.approx(200, abs=2)
    assert int(found.group(2)) == pytest.approx(449, abs=2)


def test_a_slowdown_that_its_waits_report_is_not_reported_twice(made: Making) -> None:
    run = made(steps=400, policy="uniform", changes=(CHANGE,), noise=0.01)

    assert [one for one in who_waited(run) if " ran at " in one] == []


def test_equal_workers_do_not_make_each_other_wait(made: Making) -> None:
    run = made(steps=200, speeds=(1.0, 1.0, 1.0), noise=0.005)

    check_message(who_waited(run), "2%")


def test_without_lockstep_workers_do_not_wait_for_each_other(made: Making) -> None:
    run = made(steps=40, policy="uniform", header={"sync": "asp"})

    assert not run.lockstep
    check_message(who_waited(run), "asp")
    assert [card.name for card in cards_of(run)] == ["Step", "Samples per second"]


def test_one_worker_waits_for_no_other(made: Making) -> None:
    assert who_waited(made(steps=20, speeds=(1.0,))) == []


def test_a_run_without_steps_has_no_figures(made: Making) -> None:
    run = made(steps=0)

    assert (cards_of(run), who_waited(run)) == ([], [])
