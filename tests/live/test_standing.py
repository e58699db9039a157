"""What follows from the reports of the workers of a quorum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.membership.member_table import (
    Happening,
    Membership,
    MembershipEvent,
    MemberState,
)
from evenstride.errors import RanksDisagree, SplitDiverged
from evenstride.integrations.torchft.live_generation import (
    Shown,
    behind,
    check_alike,
    generation_of,
    happenings,
    leader_of,
)
from tests.messages import raises_message

POSITION = {"epoch": 0, "position": 24, "step": 2}


def shown(name: str, kept: int = 2, **values: object) -> Shown:
    one = Shown(
        f"host/{name}", f"first of {name}", kept, 3, False, POSITION, {"seed": 0}, {"slot": 0}
    )
    return replace(one, **values)  # type: ignore[arg-type]


def changes(news: tuple[Happening, ...]) -> list[tuple[str, MembershipEvent]]:
    return [(one.worker[-1], one.change) for one in news]


def before(*names: str) -> Membership:
    return Membership.formed(3, tuple(f"host/{name}" for name in names))


def incarnations(*names: str) -> dict[str, str]:
    return {f"host/{name}": f"first of {name}" for name in names}


def test_a_shown_state_arrives_unchanged() -> None:
    one = shown("a", weights="digest", micro=True)

    assert Shown.from_text(one.to_text()) == one


def test_a_worker_with_fewer_committed_steps_is_behind() -> None:
    assert behind([shown("a", 2), shown("b", 3), shown("c", 3)]) == {0}


def test_the_leader_stays_leader_unless_it_is_behind() -> None:
    led = shown("b", leads=True)

    assert leader_of([shown("a"), led]) == 1
    assert leader_of([shown("a", 3), replace(led, kept=2)]) == 0
    assert leader_of([shown("a", 1), shown("b"), shown("c")]) == 1


def test_of_two_former_leaders_the_later_one_leads() -> None:
    earlier, later = shown("a", leads=True), shown("b", leads=True, generation=4)

    assert leader_of([earlier, later]) == 1
    assert generation_of([earlier, later]) == 5


def test_nothing_has_happened_where_the_same_meet_again() -> None:
    assert happenings(before("a", "b"), incarnations("a", "b"), [shown("a"), shown("b")]) == ()


def test_a_worker_outside_the_quorum_is_lost() -> None:
    news = happenings(before("a", "b"), incarnations("a", "b"), [shown("a")])

    assert changes(news) == [("b", MembershipEvent.LOST)]


def test_a_restarted_worker_is_lost_and_joins_without_being_ready() -> None:
    again = shown("b", 0, incarnation="second of b")

    news = happenings(before("a", "b"), incarnations("a", "b"), [shown("a"), again])

    assert changes(news) == [("b", MembershipEvent.LOST), ("b", MembershipEvent.JOIN)]
    assert news[0].why == "its process started again"
    assert before("a", "b").after_all(news)[0].standing("host/b") is MemberState.JOINING


def test_a_worker_that_missed_a_step_gets_no_samples_until_it_is_ready() -> None:
    late = [shown("a", 3), shown("b", 2)]
    joining, _ = before("a", "b").after_all(
        happenings(before("a", "b"), incarnations("a", "b"), late)
    )

    assert joining.standing("host/b") is MemberState.JOINING
    assert happenings(joining, incarnations("a", "b"), late) == ()

    news = happenings(joining, incarnations("a", "b"), [shown("a", 3), shown("b", 3)])

    assert changes(news) == [("b", MembershipEvent.READY)]


@given(
    old=st.sets(st.sampled_from("abcd"), min_size=1),
    now=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.booleans(), st.integers(1, 2)), min_size=1
    ),
)
def test_whatever_happened_makes_the_members_of_now(
    old: set[str], now: dict[str, tuple[bool, int]]
) -> None:
    here = [
        shown(name, kept, **({"incarnation": "another"} if again else {}))
        for name, (again, kept) in now.items()
    ]

    after, transitions = before(*old).after_all(happenings(before(*old), incarnations(*old), here))

    assert not any(transition.refused for transition in transitions)
    assert set(after.workers) == {one.name for one in here}
    late = {here[rank].name for rank in behind(here)}
    joining = {m.worker for m in after.members if m.standing is MemberState.JOINING}
    assert joining == late


@pytest.mark.parametrize(
    "other",
    [
        shown("a"),
        shown("b", settings={"seed": 1}),
    ],
)
def test_workers_that_cannot_train_together_are_refused(other: Shown) -> None:
    with raises_message(RanksDisagree):
        check_alike([shown("a"), other])


def test_different_weights_at_the_start_are_refused() -> None:
    with raises_message(RanksDisagree):
        check_alike([shown("a", 0, weights="x"), shown("b", 0, weights="y")])

    check_alike([shown("a", 2), shown("b", 0, weights="y")])  # it gets the others'


def test_a_worker_with_as_many_steps_on_other_data_is_refused() -> None:
    elsewhere = {**POSITION, "position": 36}

    with raises_message(SplitDiverged, "epoch 0", "sample 36"):
        check_alike([shown("a"), shown("b", position=elsewhere)])

    check_alike([shown("a"), shown("b", 1, position=elsewhere)])
