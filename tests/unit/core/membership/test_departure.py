"""What is done about a notice, at the very times where it changes."""

from __future__ import annotations

from math import nextafter

import pytest

from evenstride.core.membership.member_table import DepartureOrder, leave, needed_s
from tests.messages import check_message

SAVE_S, AHEAD_S = 10.0, 4.0
NEEDS_S = 1.5 * SAVE_S + AHEAD_S + 1.0


def _leave(left_s: float | None, *, final: bool = False, again: bool = False) -> DepartureOrder:
    return leave(left_s, SAVE_S, AHEAD_S, final=final, again=again)


def test_a_save_may_take_half_as_long_again_and_comes_after_the_steps_that_are_drawn() -> None:
    assert needed_s(SAVE_S, AHEAD_S) == NEEDS_S == 20.0


@pytest.mark.parametrize("final", [False, True])
def test_time_that_just_suffices_is_time_to_save(final: bool) -> None:
    just, short = (_leave(left_s, final=final) for left_s in (NEEDS_S, nextafter(NEEDS_S, 0)))

    assert (just.save, just.go) == (True, True)
    assert (short.save, short.go) == (False, True)


def test_the_remaining_time_is_never_shown_below_zero() -> None:
    check_message(_leave(-5.0).reason, "20 s")


@pytest.mark.parametrize("again", [False, True])
def test_a_notice_that_may_be_withdrawn_is_waited_for_while_two_saves_are_possible(
    again: bool,
) -> None:
    last_s = 2 * NEEDS_S + 8.0

    waits, goes = (_leave(left_s, again=again) for left_s in (last_s, nextafter(last_s, 0)))

    assert (waits.save, waits.go) == (not again, False)
    assert (goes.save, goes.go) == (True, True)


def test_a_final_notice_and_one_without_a_time_are_not_waited_for() -> None:
    assert _leave(1e6, final=True, again=True).go
    assert _leave(None, again=True).go


def test_a_run_without_checkpoints_releases_no_worker() -> None:
    reported = leave(1.0, None, AHEAD_S, final=True, again=False)

    assert (reported.save, reported.go) == (False, False)
