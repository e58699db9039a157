"""Plans of faults, and the generations they come to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evenstride.errors import ConfigError
from evenstride.testing.faults.fault_plan import (
    END,
    Arrival,
    Fault,
    FaultPlan,
    Generation,
    ScriptedRoster,
    happening,
    simulate_plan,
    steps_again,
)
from tests.messages import check_message, raises_message


def plan_of(*faults: Fault, joins: tuple[Arrival, ...] = (), **other: Any) -> FaultPlan:
    """Return a plan of three workers and forty steps, saved every five."""
    fields: dict[str, Any] = {"workers": ["a", "b", "c"], "steps": 40, "save_every": 5}
    return FaultPlan(**{**fields, **other}, faults=list(faults), joins=list(joins))


def generations(plan: FaultPlan, **left: Any) -> list[tuple[int, int, str, str]]:
    """Return (first step, last step, members, end) of each generation."""
    return [
        (one.first_step, one.last_step, "".join(one.members), one.ended_by)
        for one in simulate_plan(plan, **left)
    ]


def test_a_run_without_faults_is_one_generation() -> None:
    assert simulate_plan(plan_of()) == [Generation(0, 0, 40, ("a", "b", "c"), END)]


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_a_loss_goes_back_to_the_newest_checkpoint_and_returning_workers_come_last(
    kind: Any,
) -> None:
    plan = plan_of(Fault(at=13, workers=["a"], kind=kind))

    assert generations(plan) == [(0, 13, "abc", f"{kind} a"), (10, 40, "bca", "end")]
    assert steps_again(simulate_plan(plan)) == 3


def test_a_loss_just_after_a_checkpoint_costs_nothing() -> None:
    plan = plan_of(Fault(at=10, workers=["b"], kind="kill", back="never"))

    assert generations(plan) == [(0, 10, "abc", "kill b"), (10, 40, "ac", "end")]
    assert steps_again(simulate_plan(plan)) == 0


def test_a_loss_before_the_first_step_and_before_any_checkpoint_begins_again() -> None:
    plan = plan_of(Fault(at=0, kind="kill"), Fault(at=3, kind="kill"))

    assert generations(plan) == [
        (0, 0, "abc", "kill a"),
        (0, 3, "bca", "kill b"),
        (0, 40, "cab", "end"),
    ]


def test_each_fault_happens_once_though_its_step_is_trained_again() -> None:
    plan = plan_of(Fault(at=13, workers=["b"], kind="kill"), Fault(at=12, kind="kill"))

    assert [end for *_, end in generations(plan)] == ["kill a", "kill b", "end"]


def test_the_leader_is_the_worker_of_rank_0_at_that_time() -> None:
    plan = plan_of(Fault(at=7, kind="kill"), Fault(at=17, kind="kill"))

    assert generations(plan) == [
        (0, 7, "abc", "kill a"),
        (5, 17, "bca", "kill b"),
        (15, 40, "cab", "end"),
    ]


def test_two_at_once_end_one_generation() -> None:
    plan = plan_of(
        Fault(at=13, workers=["b", "c"], kind="kill", back=24),
        Fault(at=13, workers=["a"], kind="raise"),
    )

    check_message(generations(plan))


def test_a_worker_that_may_return_at_a_committed_step_returns_at_once() -> None:
    plan = plan_of(
        Fault(at=13, workers=["b"], kind="kill", back=12), joins=(Arrival(at=11, workers=["d"]),)
    )

    assert generations(plan) == [
        (0, 11, "abc", "join d"),
        (10, 13, "abcd", "kill b"),
        (10, 40, "acdb", "end"),
    ]


def test_an_arrival_during_a_loss_comes_with_the_next_generation() -> None:
    plan = plan_of(
        Fault(at=13, workers=["b"], kind="kill", back="never"),
        joins=(Arrival(at=13, workers=["d"]),),
    )

    assert generations(plan) == [(0, 13, "abc", "kill b, join d"), (10, 40, "acd", "end")]


def test_a_loss_during_a_restart_ends_a_generation_without_a_step() -> None:
    plan = plan_of(
        Fault(at=12, workers=["b"], kind="kill"),
        Fault(at=12, workers=["c"], kind="kill", restart=True),
    )

    assert generations(plan) == [
        (0, 12, "abc", "kill b"),
        (10, 10, "acb", "kill c"),
        (10, 40, "abc", "end"),
    ]


def test_a_fault_of_a_restart_waits_for_its_step_to_be_committed() -> None:
    plan = plan_of(
        Fault(at=12, workers=["b"], kind="kill"),
        Fault(at=20, workers=["c"], kind="kill", restart=True),
        Fault(at=22, workers=["b"], kind="kill"),
    )

    assert [(first, end) for first, _, _, end in generations(plan)] == [
        (0, "kill b"),
        (10, "kill b"),
        (20, "kill c"),
        (20, "end"),
    ]


def test_a_full_disk_ends_nothing_but_its_checkpoint_is_missing_later() -> None:
    full = Fault(at=15, kind="disk-full")

    assert generations(plan_of(full)) == [(0, 40, "abc", "end")]
    assert generations(plan_of(full, Fault(at=17, kind="kill"))) == [
        (0, 17, "abc", "kill a"),
        (10, 40, "bca", "end"),
    ]


def test_a_damaged_checkpoint_is_passed_over() -> None:
    plan = plan_of(Fault(at=17, kind="corrupt-newest"), Fault(at=3, kind="corrupt-newest"))

    assert generations(plan) == [
        (0, 3, "abc", "corrupt-newest a"),
        (0, 17, "bca", "corrupt-newest b"),
        (10, 40, "cab", "end"),
    ]


@pytest.mark.parametrize(("completes", "first"), [(False, 10), (True, 15)])
def test_a_crash_in_a_save_counts_it_only_if_it_was_complete(completes: bool, first: int) -> None:
    crash = Fault(at=15, kind="crash-in-save", write=2, completes=completes)

    assert generations(plan_of(crash)) == [
        (0, 15, "abc", "crash-in-save a"),
        (first, 40, "bca", "end"),
    ]


def test_a_crash_in_a_save_waits_for_a_save_of_its_step() -> None:
    plan = plan_of(
        Fault(at=7, workers=["b"], kind="kill", back=11),
        Fault(at=10, workers=["b"], kind="crash-in-save", write=1),
    )

    assert [end for *_, end in generations(plan)] == ["kill b", "join b", "end"]


@pytest.mark.parametrize("left_at", [None, {0: 16}])
def test_a_leave_after_a_notice_trains_nothing_again(left_at: dict[int, int] | None) -> None:
    plan = plan_of(Fault(at=13, workers=["b"], kind="term", back=30))

    leave = 16 if left_at else 13
    assert generations(plan, left_at=left_at) == [
        (0, leave, "abc", "term b"),
        (leave, 30, "ac", "join b"),
        (30, 40, "acb", "end"),
    ]


def test_a_leave_together_with_a_loss_saves_nothing() -> None:
    plan = plan_of(
        Fault(at=13, workers=["b"], kind="term"), Fault(at=13, workers=["c"], kind="kill")
    )

    assert generations(plan) == [(0, 13, "abc", "term b, kill c"), (10, 40, "abc", "end")]


def test_a_plan_that_leaves_no_worker_is_refused() -> None:
    plan = plan_of(Fault(at=13, workers=["a", "b", "c"], kind="kill", back=20))

    with raises_message(ConfigError, "step 13"):
        simulate_plan(plan)


def test_more_restarts_than_allowed_are_refused() -> None:
    faults = [Fault(at=step, kind="kill") for step in (3, 6, 9)]

    assert len(simulate_plan(plan_of(*faults, restarts=3))) == 4
    with raises_message(ConfigError):
        simulate_plan(plan_of(*faults, restarts=2))


def test_a_fault_of_an_absent_worker_waits_until_it_trains_that_step() -> None:
    plan = plan_of(
        Fault(at=7, workers=["b"], kind="kill", back=12), Fault(at=11, workers=["b"], kind="kill")
    )

    assert generations(plan) == [
        (0, 7, "abc", "kill b"),
        (5, 12, "ac", "join b"),
        (10, 11, "acb", "kill b"),
        (10, 40, "acb", "end"),
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"faults": [{"at": 3, "workers": ["z"], "kind": "kill"}]}, ("'z'",)),
        ({"faults": [{"at": 40, "kind": "kill"}]}, ("40", "39")),
        ({"faults": [{"at": 7, "kind": "disk-full"}]}, ()),
        ({"faults": [{"at": 0, "kind": "disk-full"}]}, ()),
        ({"faults": [{"at": 5, "kind": "crash-in-save"}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "write": 1}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "completes": True}]}, ()),
        ({"faults": [{"at": 5, "kind": "term", "restart": True}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "back": "soon"}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "back": True}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "workers": []}]}, ()),
        ({"faults": [{"at": 5, "kind": "kill", "workers": ["a", "a"]}]}, ("'a'",)),
        ({"workers": ["a", "b", "a"]}, ("'a'",)),
        ({"joins": [{"at": 5, "workers": ["a"]}]}, ("'a'",)),
        ({"joins": [{"at": 0, "workers": ["d"]}]}, ("39",)),
    ],
)
def test_a_plan_that_cannot_be_says_why(fields: dict[str, Any], said: tuple[str, ...]) -> None:
    whole = {"workers": ["a", "b", "c"], "steps": 40, "save_every": 5, **fields}

    with pytest.raises(ValidationError) as refusal:
        FaultPlan.model_validate(whole)
    check_message(str(refusal.value), *said)


def test_a_plan_travels_as_json() -> None:
    plan = plan_of(
        Fault(at=13, workers=["b"], kind="kill", back=20), joins=(Arrival(at=7, workers=["d"]),)
    )

    assert FaultPlan.model_validate_json(plan.model_dump_json()) == plan


def test_a_fault_happens_only_in_a_generation_with_a_victim() -> None:
    plan = plan_of(Fault(at=13, workers=["b"], kind="kill"), joins=(Arrival(at=7, workers=["d"]),))

    assert [n for n, _ in happening(plan, ScriptedRoster.opening(plan), (), 13)] == [0]
    assert happening(plan, ScriptedRoster.opening(plan), (0,), 13) == ()
    assert happening(plan, ScriptedRoster(("a", "c")), (), 13) == ()
    assert ScriptedRoster.opening(plan).arrivals(0) == (7,)
    assert ScriptedRoster.opening(plan).arrivals(7) == ()


NAMES = ["a", "b", "c", "d"]
faults = st.builds(
    Fault,
    at=st.integers(0, 29),
    workers=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    kind=st.sampled_from(["kill", "stop", "raise", "term"]),
    back=st.one_of(st.just("now"), st.integers(0, 29)),
)


@given(faults=st.lists(faults, max_size=6), every=st.integers(1, 9))
def test_every_plan_ends_and_its_generations_fit_together(faults: list[Fault], every: int) -> None:
    plan = FaultPlan(workers=[*NAMES, "e"], steps=30, save_every=every, faults=faults)

    generations = simulate_plan(plan)

    assert generations[-1].ended_by == END
    assert generations[-1].last_step == 30
    for number, one in enumerate(generations):
        assert one.number == number
        assert one.first_step <= one.last_step <= 30
        assert len(set(one.members)) == len(one.members) > 0
    for before, after in itertools.pairwise(generations):
        assert before.ended_by != END
        assert 0 <= before.last_step - after.first_step < every
        kept = [name for name in before.members if name in after.members]
        causes = before.ended_by.split(", ")
        lost = {word.split()[1] for word in causes if not word.startswith("join ")}
        assert list(after.members)[: len(kept) - len(lost & set(kept))] == [
            name for name in kept if name not in lost
        ]


@given(faults=st.lists(faults, max_size=6), every=st.integers(1, 9))
def test_a_plan_comes_to_the_same_generations_whatever_the_order_of_its_faults(
    faults: list[Fault], every: int
) -> None:
    plans = [
        FaultPlan(workers=[*NAMES, "e"], steps=30, save_every=every, faults=listed)
        for listed in (faults, faults[::-1])
    ]

    one, other = (
        [(g.first_step, g.last_step, set(g.members)) for g in simulate_plan(plan)] for plan in plans
    )

    assert one == other
