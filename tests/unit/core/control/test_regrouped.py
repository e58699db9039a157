"""What is kept, and what is forgotten, when a group forms again or workers are recognised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.core.control.events import (
    ExchangeAfter,
    Exchanged,
    FleetFormed,
    KeepShares,
    LetGo,
    Recalled,
    SaveAfter,
)
from evenstride.core.fleet import Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.time_model.observation import Measurements, Observation
from tests.messages import check_message
from tests.unit.core.control.test_fleet_changes import BATCH, WORKERS, Run, notice_of, only


def _lasting(rank: int, left_s: float = 600.0) -> Happening:
    return notice_of(rank, left_s, final=False)


def test_another_group_saves_for_a_notice_again() -> None:
    run = Run()
    run.exchange(4)
    assert only(SaveAfter, run.change(_lasting(2)))
    run.put(FleetFormed(1, run.step, BATCH, WORKERS))
    run.exchange()

    assert only(SaveAfter, run.change(_lasting(2)))


def test_a_notice_that_comes_back_is_saved_for_again() -> None:
    run = Run()
    run.exchange(4)
    run.change(_lasting(2))
    run.change(Happening("h/2", MembershipEvent.WITHDRAWN))

    assert only(SaveAfter, run.change(_lasting(2)))


def test_two_notices_are_saved_for_once_each() -> None:
    run = Run()
    run.exchange(4)
    for rank in (1, 2):
        assert only(SaveAfter, run.change(_lasting(rank)))

    assert not only(SaveAfter, run.change(_lasting(1, 590.0)))


def test_time_to_save_is_counted_from_the_last_step_that_is_drawn() -> None:
    """Three steps of 10 s of communication, half as much again as a save, and a second."""
    run = Run()
    run.exchange(4)
    run.control = replace(run.control, communication_s=10.0)

    assert not only(SaveAfter, run.change(notice_of(1, 30.0 + 1.5 + 1.0)))
    assert only(SaveAfter, run.change(notice_of(2, 30.0 + 1.5 + 1.0 + 1.0)))


def test_a_worker_with_a_notice_is_released_before_it_is_ready_too() -> None:
    run = Run(workers=WORKERS[:2])
    run.exchange(4)
    run.put(FleetFormed(1, run.step, BATCH, WORKERS, (Happening("h/2", MembershipEvent.JOIN),)))

    (gone,) = only(LetGo, run.change(notice_of(2, 60.0)))

    assert gone.ranks == (2,)


def test_ranks_and_generation_are_those_of_the_group_that_has_met() -> None:
    run = Run()
    run.exchange(4)
    lost = (Happening("h/0", MembershipEvent.LOST),)
    run.put(FleetFormed(5, run.step, BATCH, (WORKERS[2], WORKERS[1]), lost))

    assert run.control.generation == 5
    assert run.control.membership.workers == ("h/2", "h/1")
    assert only(LetGo, run.change(notice_of(2, 60.0)))[0].ranks == (0,)


def test_counts_of_refused_reports_stay_with_their_workers() -> None:
    run = Run()
    strange = Measurements.of([Observation(1, run.shares[1], 0, (-1.0,), (0.0,))])
    run.put(Exchanged(3, 4, strange))
    assert list(run.control.refused) == [0, 1, 0]

    run.put(FleetFormed(1, 3, BATCH, (WORKERS[1], Worker("k/0"))))

    assert list(run.control.refused) == [1, 0]


def test_the_opening_ends_when_a_worker_gets_a_notice() -> None:
    run = Run()
    assert run.control.opening_left > 0

    instructions = run.change(notice_of(1, 60.0))

    following = ExchangeAfter(run.control.cadence.fewest_steps, False)
    assert only(ExchangeAfter, instructions) == [following]
    assert run.control.opening_left == 0


def test_a_single_worker_has_no_opening() -> None:
    run = Run(workers=WORKERS[:1])

    assert run.control.opening_left == 0


@pytest.mark.parametrize("exchanges", [0, 9])
def test_the_opening_waits_for_what_it_measures_though_a_checkpoint_was_recalled(
    exchanges: int,
) -> None:
    run, earlier = Run(), Run()
    earlier.exchange(5)
    if exchanges:
        run.exchange(exchanges)
    opening = run.control.opening_left > 0
    assert opening is not bool(exchanges)

    instructions = run.put(Recalled(run.step, run.step + 1, earlier.control.known, 1))

    assert only(ExchangeAfter, instructions) == [ExchangeAfter(1, opening)]


def test_measurements_of_the_run_are_not_replaced_by_recalled_ones() -> None:
    run = Run()
    run.exchange(5)
    run.put(FleetFormed(1, run.step, BATCH, WORKERS[:2]))
    known = {one.slot: one for one in run.control.known}
    first, second, third, fourth, fifth = known[2].curve
    older = replace(known[2], curve=(first, 10 * second, third, fourth, fifth))

    (kept,) = only(KeepShares, run.put(Recalled(run.step, run.step + 1, (older,), 6)))

    check_message(kept.reason)
    assert {one.slot: one for one in run.control.known}[2] == known[2]
    assert run.control.generation == 6
