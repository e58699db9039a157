"""Who serves when few are left, and what people are told of each change."""

from __future__ import annotations

import pytest

from evenstride.core.membership import Change, Happening, Member, Membership, Standing

TWO = Membership.formed(0, ("a/0", "b/1"))


def _of(*standings: Standing) -> Membership:
    return Membership(0, tuple(Member(f"h/{k}", s) for k, s in enumerate(standings)))


def test_where_nobody_else_can_those_who_are_leaving_go_on() -> None:
    assert _of(Standing.LEAVING, Standing.JOINING, Standing.LEAVING).serving == (0, 2)


@pytest.mark.parametrize("standing", [Standing.JOINING, Standing.LEAVING_EARLY])
def test_who_has_no_weights_yet_never_serves(standing: Standing) -> None:
    assert _of(standing, standing).serving == ()
    assert _of(standing, Standing.LEAVING).serving == (1,)


def test_who_is_ready_only_after_its_notice_is_leaving() -> None:
    joining, _ = TWO.after(Happening("c/2", Change.JOIN))
    noticed, _ = joining.after(Happening("c/2", Change.NOTICE, 60.0))
    ready, _ = noticed.after(Happening("c/2", Change.READY))

    assert ready.standing("c/2") is Standing.LEAVING
    assert ready.serving == (0, 1)


def test_a_newcomer_has_the_last_rank() -> None:
    joined, _ = TWO.after(Happening("c/2", Change.JOIN))

    assert joined.workers == ("a/0", "b/1", "c/2")


@pytest.mark.parametrize("before", [Standing.LEAVING, Standing.LEAVING_EARLY])
def test_a_notice_may_be_given_another_time(before: Standing) -> None:
    after, transition = _of(before).after(Happening("h/0", Change.NOTICE, 30.0))

    assert not transition.refused
    assert after.standing("h/0") is before


@pytest.mark.parametrize(
    ("happening", "told"),
    [
        (Happening("a/0", Change.NOTICE, -3.0), "a/0 is to leave in 0 s"),
        (Happening("a/0", Change.NOTICE, 0.0), "a/0 is to leave in 0 s"),
        (Happening("a/0", Change.NOTICE), "a/0 is to leave"),
        (Happening("a/0", Change.LOST, 30.0), "a/0 is lost"),
    ],
)
def test_the_time_of_a_notice_is_told_and_never_below_zero(happening: Happening, told: str) -> None:
    _, transition = TWO.after(happening)

    assert transition.reason == told


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        (Change.READY, "be ready"),
        (Change.NOTICE, "be told to leave"),
        (Change.LOST, "be lost"),
        (Change.WITHDRAWN, "stay after all"),
        (Change.LEAVE, "leave"),
    ],
)
def test_what_a_stranger_cannot_is_told_in_words(change: Change, asked: str) -> None:
    _, transition = TWO.after(Happening("z/9", change))

    assert transition.reason == f"z/9 cannot {asked}, as it is gone; possible now: join"
