"""Whatever happens to workers in whatever order, the table keeps the run whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.membership.member_table import (
    TABLE,
    Happening,
    Member,
    Membership,
    MembershipEvent,
    MemberState,
)
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message

NAMES = ("a/0", "a/1", "b/2", "c/3")
HAPPENINGS = st.builds(
    Happening,
    st.sampled_from(NAMES),
    st.sampled_from(MembershipEvent),
    st.none() | st.floats(0, 1000),
    st.sampled_from(["", "the cloud said so"]),
    st.booleans(),
)
FORMED = Membership.formed(0, NAMES[:3])


@given(st.lists(HAPPENINGS, max_size=30))
def test_each_change_follows_the_table_or_changes_nothing(happenings: list[Happening]) -> None:
    membership = FORMED
    for happening in happenings:
        before = membership.standing(happening.worker)
        after, transition = membership.after(happening)
        expected = TABLE.get((before, happening.change))
        assert transition.refused == (expected is None)
        if expected is None:
            assert after == membership
        assert after.standing(happening.worker) == (expected or before)
        assert [m for m in after.members if m.worker != happening.worker] == [
            m for m in membership.members if m.worker != happening.worker
        ], "no other worker is touched, and the order of ranks stays"
        assert happening.worker in transition.reason
        membership = after


@given(st.lists(HAPPENINGS, max_size=30))
def test_a_generation_ends_when_the_group_changes_and_only_then(
    happenings: list[Happening],
) -> None:
    membership = FORMED
    for happening in happenings:
        after, transition = membership.after(happening)
        changed = set(after.workers) != set(membership.workers)
        assert transition.regroups == changed
        assert after.generation == membership.generation + changed
        membership = after


@given(st.lists(HAPPENINGS, max_size=8))
def test_changes_known_at_the_same_time_form_at_most_one_new_group(
    happenings: list[Happening],
) -> None:
    one_by_one = FORMED
    for happening in happenings:
        one_by_one, _ = one_by_one.after(happening)
    at_once, transitions = FORMED.after_all(tuple(happenings))

    assert at_once.members == one_by_one.members
    assert at_once.generation == any(transition.regroups for transition in transitions)


@given(st.lists(HAPPENINGS, max_size=30))
def test_serving_workers_are_ready_and_leave_only_if_all_do(happenings: list[Happening]) -> None:
    membership, _ = FORMED.after_all(tuple(happenings))
    standings = [membership.members[place].standing for place in membership.serving]
    all_of_them = {member.standing for member in membership.members}

    assert len(set(standings)) <= 1
    if MemberState.SERVING in all_of_them:
        assert set(standings) == {MemberState.SERVING}
    elif MemberState.LEAVING in all_of_them:
        assert set(standings) == {MemberState.LEAVING}
    else:
        assert not standings


def test_a_notice_that_is_withdrawn_leaves_things_as_they_were() -> None:
    joining, _ = FORMED.after(Happening("c/3", MembershipEvent.JOIN))
    for worker in ("a/1", "c/3"):
        noticed, reported = joining.after(Happening(worker, MembershipEvent.NOTICE, 120.0, "spot"))
        again, _ = noticed.after(Happening(worker, MembershipEvent.WITHDRAWN))
        assert noticed != joining
        assert again == joining
        check_message(reported.reason, worker, "120 s")


def test_a_refusal_says_what_is_possible() -> None:
    _, refused = FORMED.after(Happening("a/0", MembershipEvent.WITHDRAWN))
    assert refused.refused
    check_message(refused.reason)


def test_members_have_names_of_their_own() -> None:
    with raises_message(ConfigError):
        Membership.formed(0, ("a/0", "a/0"))
    with raises_message(ConfigError):
        Membership(0, (Member("a/0", MemberState.GONE),))


def test_every_standing_can_be_lost_or_left_but_the_last() -> None:
    for standing in set(MemberState) - {MemberState.GONE}:
        assert TABLE[standing, MembershipEvent.LOST] is MemberState.GONE
        assert TABLE[standing, MembershipEvent.LEAVE] is MemberState.GONE
    assert [change for at, change in TABLE if at is MemberState.GONE] == [MembershipEvent.JOIN]
