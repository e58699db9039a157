"""Who leaves gets no samples, who comes back is known, and who was known is known again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Event,
    Exchanged,
    Expect,
    FleetFormed,
    Instruction,
    KeepShares,
    LetGo,
    MembersChanged,
    NotMeasured,
    Recalled,
    SaveAfter,
    SetShares,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent, MemberState
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError
from evenstride.trace.codec import decode, dumps, encode
from tests.messages import check_message, raises_message

PER_SAMPLE_S = (0.001, 0.002, 0.004)
WORKERS = tuple(Worker(f"h/{k}", device="cpu x", slot=k) for k in range(3))
BATCH = 70


def _seen(shares: Shares, step: int) -> Measurements:
    return Measurements.of(
        Observation(k, shares[k], step + i, (0.002 + PER_SAMPLE_S[k] * max(shares[k], 1),), (0.0,))
        for k in range(len(shares))
        for i in range(3)
    )


class Run:
    """A control that is fed one event after another."""

    def __init__(self, policy: str = "adaptive", workers: tuple[Worker, ...] = WORKERS) -> None:
        self.control, self.step = Control(policy_from_spec(policy)), 0
        self.shares: Shares = ()
        self.put(FleetFormed(0, 0, BATCH, workers))

    def put(self, event: Event) -> tuple[Instruction, ...]:
        assert decode(_through_text(encode(event))) == event
        self.control, instructions = advance(self.control, event)
        for instruction in instructions:
            assert decode(_through_text(encode(instruction))) == instruction
            if isinstance(instruction, SetShares):
                self.shares = instruction.shares
        return tuple(instructions)

    def exchange(self, times: int = 1) -> tuple[Instruction, ...]:
        for _ in range(times):
            self.step += 3
            instructions = self.put(
                Exchanged(self.step, self.step + 1, _seen(self.shares, self.step - 3))
            )
        return tuple(instructions)

    def change(self, *happenings: Happening, save_s: float | None = 1.0) -> tuple[Instruction, ...]:
        return self.put(MembersChanged(self.step, self.step + 2, happenings, save_s))


def _through_text(plain: dict[str, Any]) -> dict[str, Any]:
    import json

    return dict(json.loads(dumps(plain)))


def notice_of(rank: int, left_s: float | None = None, *, final: bool = True) -> Happening:
    return Happening(f"h/{rank}", MembershipEvent.NOTICE, left_s, "spot", final)


def only(kind: type, instructions: tuple[Instruction, ...]) -> list[Any]:
    return [one for one in instructions if isinstance(one, kind)]


def test_the_others_take_over_the_share_of_one_that_is_to_leave() -> None:
    run = Run()
    run.exchange(4)
    before = run.shares

    instructions = run.change(notice_of(1, 60.0))

    (moved,) = only(SetShares, instructions)
    assert moved.effective == run.step + 2
    assert moved.shares[1] == 0
    assert sum(moved.shares) == BATCH == sum(before)
    assert moved.shares[0] > before[0]
    assert moved.shares[2] > before[2]
    assert abs(PER_SAMPLE_S[0] * moved.shares[0] - PER_SAMPLE_S[2] * moved.shares[2]) < 0.006
    check_message(moved.reason, "60 s")
    (expect,) = only(Expect, instructions)
    assert expect.expected_s[1] == 0.0
    assert min(expect.expected_s[0], expect.expected_s[2]) > 0


def test_what_a_ghost_reports_teaches_nothing_and_the_others_are_balanced_further() -> None:
    run = Run()
    run.exchange(4)
    run.change(notice_of(0, 60.0))
    shares = run.shares
    for _ in range(3):
        run.exchange()
    assert run.shares[0] == 0
    assert sum(run.shares) == BATCH
    assert run.shares == shares or abs(run.shares[1] - shares[1]) <= 3
    assert run.control.refused == (0, 0, 0)


def test_a_notice_that_is_withdrawn_gives_back_the_very_split() -> None:
    run = Run()
    run.exchange(6)
    before = run.shares
    run.change(notice_of(1, 600.0, final=False))
    run.exchange(2)

    run.change(Happening("h/1", MembershipEvent.WITHDRAWN))

    assert all(abs(a - b) <= 2 for a, b in zip(run.shares, before, strict=True))
    assert run.control.membership.serving == (0, 1, 2)


@pytest.mark.parametrize(
    ("left_s", "final", "saves", "goes"),
    [
        (None, True, True, True),
        (60.0, True, True, True),
        (600.0, False, True, False),
        (10.0, False, True, True),
        (1.0, True, False, True),
        (1.0, False, False, True),
    ],
)
def test_the_state_is_saved_if_time_allows_and_a_final_notice_ends_the_worker(
    left_s: float | None, final: bool, saves: bool, goes: bool
) -> None:
    run = Run()
    run.exchange(4)
    instructions = run.change(notice_of(2, left_s, final=final))

    assert [one.steps for one in only(SaveAfter, instructions)] == [run.step + 3] * saves
    assert [(one.steps, one.ranks) for one in only(LetGo, instructions)] == [
        (run.step + 3, (2,))
    ] * goes


def test_a_notice_that_runs_out_saves_once_more_and_lets_the_worker_go() -> None:
    run = Run()
    run.exchange(4)
    assert only(SaveAfter, run.change(notice_of(2, 600.0, final=False)))
    later = run.change(notice_of(2, 590.0, final=False))
    assert not only(SaveAfter, later)
    assert not only(LetGo, later)
    last = run.change(notice_of(2, 9.0, final=False))
    assert only(SaveAfter, last)
    assert only(LetGo, last)


def test_without_checkpoints_no_worker_is_released() -> None:
    run = Run()
    run.exchange(4)
    instructions = run.change(notice_of(2), save_s=None)
    assert run.shares[2] == 0
    assert not only(SaveAfter, instructions) + only(LetGo, instructions)


def test_where_all_are_to_leave_they_go_on_until_they_go() -> None:
    run = Run()
    run.exchange(4)
    before = run.shares
    instructions = run.change(*(notice_of(k) for k in range(3)))
    assert run.shares == before
    assert only(LetGo, instructions)[0].ranks == (0, 1, 2)


def test_where_the_others_cannot_hold_the_batch_the_leaver_keeps_its_share() -> None:
    workers = tuple(Worker(f"h/{k}", max_share=30) for k in range(3))
    run = Run("uniform", workers)
    before = run.shares
    (kept,) = only(KeepShares, run.change(notice_of(0, 60.0)))
    assert run.control.rank_shares == before
    check_message(kept.reason)
    run.exchange()


def test_a_fixed_split_stays_when_a_worker_gets_a_notice() -> None:
    run = Run("static:30,20,20")
    (kept,) = only(KeepShares, run.change(notice_of(0, 60.0)))
    check_message(kept.reason)


def test_a_returning_worker_is_recognised_by_its_name_alone() -> None:
    workers = tuple(Worker(f"h/{k}") for k in range(3))
    run = Run(workers=workers)
    run.exchange(5)
    before = run.shares
    run.put(FleetFormed(1, run.step, BATCH, workers[:2]))
    run.exchange(2)
    run.put(FleetFormed(2, run.step, BATCH, workers))
    assert all(abs(a - b) <= 2 for a, b in zip(run.shares, before, strict=True))


def test_profiles_of_a_checkpoint_give_the_first_split_of_a_new_process() -> None:
    run = Run()
    run.exchange(5)
    moved = tuple(
        Worker(f"h/{rank}", device="cpu x", slot=slot) for rank, slot in enumerate((2, 0))
    )
    again = Run(workers=moved)
    assert again.shares == (35, 35)

    (split,) = only(SetShares, again.put(Recalled(0, 0, run.control.known, 3)))

    fast, slow = split.shares[1], split.shares[0]
    assert abs(0.002 + 0.001 * fast - 0.002 - 0.004 * slow) < 0.005, "by slot, not by rank"
    check_message(split.reason)
    assert again.control.generation == 3


def test_a_like_device_elsewhere_is_believed_less() -> None:
    run = Run()
    run.exchange(5)
    here, there = (
        Run(workers=(Worker(f"{host}/0", device="cpu x", slot=1), Worker("z/1", device="gpu")))
        for host in ("h", "elsewhere")
    )
    for one in (here, there):
        one.put(Recalled(0, 0, run.control.known, 1))
    deviations = [
        float(one.control.estimate.relative_std(one.control.estimate.steps * 0 + 20)[0])
        for one in (here, there)
        if one.control.estimate is not None
    ]
    assert deviations[0] < deviations[1]


def test_unknown_devices_recall_nothing_and_change_nothing() -> None:
    run = Run()
    run.exchange(5)
    again = Run(workers=(Worker("n/0", device="gpu"), Worker("n/1", device="gpu")))
    before = again.control.shares
    (kept,) = only(KeepShares, again.put(Recalled(0, 0, run.control.known, 1)))
    assert again.control.shares == before
    check_message(kept.reason)
    assert len(again.control.known) == 3, "they may come back"


def test_a_joiner_gets_no_samples_until_it_is_ready() -> None:
    run = Run(workers=WORKERS[:2])
    run.exchange(4)
    joined = FleetFormed(1, run.step, BATCH, WORKERS, (Happening("h/2", MembershipEvent.JOIN),))
    run.put(joined)
    assert run.shares[2] == 0
    assert sum(run.shares) == BATCH
    assert run.control.membership.standing("h/2") is MemberState.JOINING
    run.change(Happening("h/2", MembershipEvent.READY))
    assert run.shares[2] > 0
    assert sum(run.shares) == BATCH


def test_a_loss_is_reported_with_the_remaining_group() -> None:
    run = Run()
    run.exchange(4)
    (split,) = only(
        SetShares,
        run.put(
            FleetFormed(
                1,
                run.step,
                BATCH,
                WORKERS[1:],
                (Happening("h/0", MembershipEvent.LOST, why="killed"),),
            )
        ),
    )
    assert split.reason.startswith("h/0 is lost (killed); ")
    assert run.control.generation == 1


def test_a_group_that_what_happened_does_not_explain_is_refused() -> None:
    run = Run()
    with raises_message(ConfigError):
        run.put(FleetFormed(1, 0, BATCH, WORKERS[:1], (Happening("h/2", MembershipEvent.LOST),)))
    assert len(run.control.roster.workers) == 3


def test_where_steps_cannot_be_measured_the_split_is_equal_and_stays() -> None:
    run = Run()
    run.exchange(5)
    known = run.control.known
    assert max(run.shares) - min(run.shares) > 1, "it had been moved by times"

    run.put(NotMeasured(6, "no clock"))
    equal = run.shares
    run.put(Recalled(6, 6, known, 1))
    run.put(Exchanged(9, 10, Measurements.of(())))

    assert max(equal) - min(equal) <= 1
    assert run.shares == equal
    assert run.control.not_measured == "no clock"


def test_a_given_split_stays_where_steps_cannot_be_measured() -> None:
    run = Run("static:10,20,40")

    instructions = run.put(NotMeasured(0, "no clock"))

    assert run.shares == (10, 20, 40)
    assert "no clock" in next(one.reason for one in instructions if isinstance(one, KeepShares))


def test_a_group_that_meets_later_is_not_measured_either() -> None:
    run = Run()
    run.put(NotMeasured(0, "no clock"))
    bounded = (replace(WORKERS[0], max_share=10), *WORKERS[1:])

    run.put(FleetFormed(1, 0, BATCH, bounded))

    assert run.shares == (10, 30, 30), "bounds hold"
    assert run.control.opening_left == 0
