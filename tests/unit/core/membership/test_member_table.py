"""The workers that serve when few are left, and the reason of each change."""

from __future__ import annotations

import pytest

from evenstride.core.membership.member_table import (
    Happening,
    Member,
    Membership,
    MembershipEvent,
    MemberState,
)
from tests.messages import check_message

TWO = Membership.formed(0, ("a/0", "b/1"))


def _of(*standings: MemberState) -> Membership:
    return Membership(0, tuple(Member(f"h/{k}", s) for k, s in enumerate(standings)))


def test_leaving_workers_continue_if_no_other_can() -> None:
    assert _of(MemberState.LEAVING, MemberState.JOINING, MemberState.LEAVING).serving == (0, 2)


@pytest.mark.parametrize("standing", [MemberState.JOINING, MemberState.LEAVING_EARLY])
def test_a_worker_without_weights_never_serves(standing: MemberState) -> None:
    assert _of(standing, standing).serving == ()
    assert _of(standing, MemberState.LEAVING).serving == (1,)


def test_a_worker_that_becomes_ready_after_its_notice_is_leaving() -> None:
    joining, _ = TWO.after(Happening("c/2", MembershipEvent.JOIN))
    noticed, _ = joining.after(Happening("c/2", MembershipEvent.NOTICE, 60.0))
    ready, _ = noticed.after(Happening("c/2", MembershipEvent.READY))

    assert ready.standing("c/2") is MemberState.LEAVING
    assert ready.serving == (0, 1)


def test_a_newcomer_has_the_last_rank() -> None:
    joined, _ = TWO.after(Happening("c/2", MembershipEvent.JOIN))

    assert joined.workers == ("a/0", "b/1", "c/2")


@pytest.mark.parametrize("before", [MemberState.LEAVING, MemberState.LEAVING_EARLY])
def test_a_notice_may_be_given_another_time(before: MemberState) -> None:
    after, transition = _of(before).after(Happening("h/0", MembershipEvent.NOTICE, 30.0))

    assert not transition.refused
    assert after.standing("h/0") is before


@pytest.mark.parametrize(
    ("happening", "reported"),
    [
        (Happening("a/0", MembershipEvent.NOTICE, -3.0), ("0 s",)),
        (Happening("a/0", MembershipEvent.NOTICE, 0.0), ("0 s",)),
        (Happening("a/0", MembershipEvent.NOTICE), ()),
        (Happening("a/0", MembershipEvent.LOST, 30.0), ()),
    ],
)
def test_the_time_of_a_notice_is_shown_and_never_below_zero(
    happening: Happening, reported: tuple[str, ...]
) -> None:
    _, transition = TWO.after(happening)

    check_message(transition.reason, *reported)


@pytest.mark.parametrize(
    "change",
    [
        MembershipEvent.READY,
        MembershipEvent.NOTICE,
        MembershipEvent.LOST,
        MembershipEvent.WITHDRAWN,
        MembershipEvent.LEAVE,
    ],
)
def test_impossible_changes_of_an_unknown_worker_have_a_reason(change: MembershipEvent) -> None:
    _, transition = TWO.after(Happening("z/9", change))

    check_message(transition.reason)
