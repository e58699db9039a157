"""What the page says of runs whose truth is known."""

from __future__ import annotations

import re

import pytest

from evenstride.report.page.findings import cards_of, headline, who_waited
from tests.messages import check_message
from tests.unit.report.page.conftest import Making

CHANGE = (200, (1.0, 0.5, 0.15))


def test_equal_shares_are_said_to_wait_and_what_balancing_could_save(made: Making) -> None:
    run = made(steps=400, policy="uniform", noise=0.01)

    told = headline(run)
    # 86 samples at 0.3, against the whole batch at 1.8 in all, with 6 ms of communication.
    bound = float(re.search(r"would be (\d\.\d+) times", told).group(1))  # type: ignore[union-attr]
    assert bound == pytest.approx((0.01 + 0.086) / 0.3 / ((0.03 + 0.256) / 1.8), rel=0.05)
    check_message(told)
    (worst, *_) = who_waited(run)
    check_message(worst)


def test_what_balancing_saved_is_told(made: Making) -> None:
    run = made(steps=400, noise=0.01)

    told = headline(run)
    check_message(told)
    assert run.totals.saved_s == pytest.approx(
        run.totals.took_s * (run.totals.speedup_model or 0.0) - run.totals.took_s, rel=0.01
    )
    names = [card.name for card in cards_of(run)]
    assert names[:3] == ["Speed-up over equal shares", "Efficiency", "Time saved"]


def test_who_slowed_down_is_named_with_the_step_also_if_nobody_waits_for_it(made: Making) -> None:
    run = made(steps=400, changes=(CHANGE,), noise=0.01)

    (told,) = [one for one in who_waited(run) if " ran at " in one]
    found = re.fullmatch(
        r"Worker 2 \(node1/2\) ran at (0\.\d+) of its best speed since step (\d+), "
        r"its share going from (\d+) to (\d+) samples\.",
        told,
    )
    assert found, told
    assert float(found.group(1)) == pytest.approx(0.5, abs=0.03)
    assert int(found.group(2)) == 200
    assert int(found.group(3)) > int(found.group(4))


def test_a_slow_stretch_that_is_over_is_told_with_its_end(made: Making) -> None:
    run = made(steps=600, changes=(CHANGE, (450, (1.0, 0.5, 0.3))), noise=0.01)

    (told,) = [one for one in who_waited(run) if " ran at " in one]
    found = re.search(r"ran at 0\.\d+ of its best speed in steps (\d+) to (\d+), its share", told)
    assert found, told
    assert int(found.group(1)) == pytest.approx(200, abs=2)
    assert int(found.group(2)) == pytest.approx(449, abs=2)


def test_what_a_wait_tells_already_is_not_told_twice(made: Making) -> None:
    run = made(steps=400, policy="uniform", changes=(CHANGE,), noise=0.01)

    assert [one for one in who_waited(run) if " ran at " in one] == []


def test_equal_workers_are_told_that_balancing_cannot_help(made: Making) -> None:
    run = made(steps=200, speeds=(1.0, 1.0, 1.0), noise=0.005)

    check_message(headline(run))
    check_message(who_waited(run), "2%")


def test_nobody_waits_where_workers_do_not_keep_step(made: Making) -> None:
    run = made(steps=40, policy="uniform", header={"sync": "asp"})

    assert not run.lockstep
    assert "nobody waits for another" in headline(run)
    check_message(who_waited(run))
    assert [card.name for card in cards_of(run)] == ["Step", "Samples per second"]


def test_one_worker_alone_has_nothing_to_balance(made: Making) -> None:
    run = made(steps=20, speeds=(1.0,))

    check_message(headline(run))
    assert who_waited(run) == []


def test_a_run_without_steps_has_no_figures(made: Making) -> None:
    run = made(steps=0)

    check_message(headline(run))
    assert (cards_of(run), who_waited(run)) == ([], [])
