"""The decision path: events in, instructions out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    ExchangeAfter,
    Exchanged,
    Expect,
    FleetFormed,
    KeepShares,
    MembersChanged,
    OpeningSkipped,
    SetShares,
)
from evenstride.core.control.schedule import HICCUP_S, ExchangeInterval, ToleranceBand
from evenstride.core.control.state import Control
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import EVERY_STEP, Move, Situation
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, InfeasibleShares
from tests.messages import check_message, raises_message

TWO = (Worker("a"), Worker("b"))


def _seen(worker: int, share: int, busy_s: float, step: int = 1, steps: int = 1) -> Observation:
    return Observation(worker, share, step, (busy_s,) * steps, (0.0,) * steps)


def test_a_fleet_forms_with_an_opening_split_and_its_first_exchange() -> None:
    control, instructions = advance(
        Control(policy_from_spec("adaptive")), FleetFormed(0, 7, 10, TWO)
    )

    first, exchange = instructions
    assert isinstance(first, SetShares)
    assert (first.effective, first.shares, exchange) == (7, (5, 5), ExchangeAfter(1, True))
    check_message(first.reason)
    assert control.shares == (5, 5)


def test_a_fixed_policy_has_no_opening_phase() -> None:
    _, (_, after) = advance(Control(policy_from_spec("uniform")), FleetFormed(0, 0, 10, TWO))

    assert after == ExchangeAfter(4, False)


def test_a_lone_worker_has_no_opening_phase() -> None:
    _, (_, after) = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 10, TWO[:1]))

    assert isinstance(after, ExchangeAfter)
    assert not after.blocking


def test_a_refused_fleet_changes_nothing() -> None:
    control = Control(policy_from_spec("uniform"))

    with pytest.raises(InfeasibleShares):
        advance(control, FleetFormed(0, 0, 1, TWO))

    assert control.fleet is None


def test_a_move_takes_effect_where_no_rank_has_drawn() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))

    control, (move, expect, after) = advance(
        control, Exchanged(3, 9, Measurements.of((_seen(0, 50, 0.05), _seen(1, 50, 0.2))))
    )

    assert isinstance(move, SetShares)
    assert move.effective == 9
    assert move.shares == control.shares
    assert sum(move.shares) == 100
    assert isinstance(expect, Expect)
    assert expect.expected_s[0] == pytest.approx(expect.expected_s[1], rel=0.05)
    assert after == ExchangeAfter(1, True)


def test_the_last_measurements_are_learned_and_decide_nothing() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 10, TWO))
    seen = Measurements.of([_seen(0, 5, 0.1, steps=4), _seen(1, 5, 0.4, steps=4)])

    moved, (first, *_) = advance(control, Exchanged(4, 5, seen))
    ended, (kept, *_) = advance(control, Exchanged(4, 5, seen, last=True))

    assert isinstance(first, SetShares) and isinstance(kept, KeepShares)
    assert ended.shares == control.shares != moved.shares
    assert ended.estimate is not None and moved.estimate is not None
    assert ended.estimate.steps.tolist() == moved.estimate.steps.tolist()


def test_the_opening_phase_ends_after_its_steps_even_if_nothing_settles() -> None:
    policy = policy_from_spec("adaptive:opening_steps=8")
    control, _ = advance(Control(policy), FleetFormed(0, 0, 10, TWO))
    blocking = []

    for step in range(2, 14):
        control, verdict = advance(control, Exchanged(step, step, Measurements.of(())))
        blocking.append(verdict.opening)

    assert blocking == [True] * 7 + [False] * 5


def test_a_step_that_says_nothing_about_speed_postpones_a_decision_of_the_opening_once() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))
    seen = [_seen(0, 50, 0.05), _seen(1, 50, 0.2)]
    unmodelled = [replace(one, busy_s=(9.0,), modelled=False) for one in seen]

    first, (kept, *_, after) = advance(control, Exchanged(2, 2, Measurements.of(unmodelled)))
    second, (move, *_) = advance(first, Exchanged(3, 3, Measurements.of(seen)))
    again, _ = advance(first, Exchanged(3, 3, Measurements.of(unmodelled)))

    assert isinstance(kept, KeepShares)
    check_message(kept.reason)
    assert after == ExchangeAfter(1, True)
    left = [each.opening_left for each in (control, first, second, again)]
    assert [left[0] - each for each in left] == [0, 0, 1, 1], "it ends even so"
    assert isinstance(move, SetShares)


@pytest.mark.parametrize(("compiled", "moves"), [(False, True), (True, False)])
def test_a_compiled_model_moves_only_if_that_is_worth_the_compilation(
    compiled: bool, moves: bool
) -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))
    seen = [_seen(0, 50, 0.1), _seen(1, 50, 0.13)]
    firsts = [replace(one, first_step=0, busy_s=(9.0,), modelled=False) for one in seen]

    both = Measurements.of([*firsts, *(replace(one, first_step=1) for one in seen)])
    _, verdict = advance(control, Exchanged(2, 2, both, compiled=compiled))

    assert (verdict.shares is not None) == moves
    assert ("its first step costs 4.4 s" in verdict.reason) == compiled


def test_skipping_the_opening_ends_the_waiting() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 10, TWO))

    control, skipped = advance(control, OpeningSkipped(0))
    _, later = advance(control, Exchanged(4, 5, Measurements.of(())))

    assert tuple(skipped) == (ExchangeAfter(4, False),)
    assert not later.opening


def test_keeping_tells_why() -> None:
    control, _ = advance(Control(policy_from_spec("uniform")), FleetFormed(0, 0, 10, TWO))

    _, (verdict, *_) = advance(
        control, Exchanged(4, 5, Measurements.of((_seen(0, 5, 0.1), _seen(1, 5, 0.1))))
    )

    assert isinstance(verdict, KeepShares)
    check_message(verdict.reason)


def test_exchanges_grow_rare_when_calm_and_frequent_on_change() -> None:
    cadence, calm = ExchangeInterval(), []
    for _ in range(8):
        cadence = cadence.following(changed=False, step_s=0.05)
        calm.append(cadence.steps)

    assert calm == [6, 12, 24, 48, 96, 100, 100, 100]
    assert cadence.following(changed=True, step_s=0.05).steps == 6


def test_fast_steps_are_exchanged_by_time_not_by_count() -> None:
    assert ExchangeInterval().following(changed=True, step_s=0.001).steps == 300
    assert ExchangeInterval().following(changed=True, step_s=10.0).steps == 4
    assert ExchangeInterval(steps=512).following(changed=False, step_s=0.001).steps == 512


@pytest.mark.parametrize(("decision_s", "steps"), [(0.0, 3), (0.02, 3), (0.2, 20), (3.0, 50)])
def test_decisions_take_at_most_a_tenth_of_the_time_or_come_every_5_s(
    decision_s: float, steps: int
) -> None:
    cadence = ExchangeInterval(fewest_steps=1)

    after = cadence.following(changed=True, step_s=0.1, decision_s=decision_s)
    calm = cadence.following(changed=False, step_s=0.1, decision_s=decision_s)

    assert after.steps == calm.steps == steps


def _exchanged(cadence: ExchangeInterval, decision_s: float, *, changed: bool) -> ExchangeInterval:
    """Return the interval after an exchange at its end, with steps of 0.1 s."""
    return cadence.following(
        changed=changed, step_s=0.1, decision_s=decision_s, passed=cadence.steps
    )


@pytest.mark.parametrize(("decision_s", "few", "usual"), [(0.02, 4, 10), (0.1, 10, 25)])
def test_frequent_decisions_take_a_fiftieth_of_the_time_until_a_run_is_calm(
    decision_s: float, few: int, usual: int
) -> None:
    cadence, spans = ExchangeInterval(steps=few), list[int]()
    for _ in range(60):
        cadence = _exchanged(cadence, decision_s, changed=True)
        spans.append(cadence.steps)

    assert set(spans[:12]) == {few}
    # To be just below the allowance makes single intervals shorter.
    assert set(spans[30:]) <= {few, usual}
    assert spans[30:].count(usual) >= 25
    for _ in range(40):
        cadence = _exchanged(cadence, decision_s, changed=False)
    for _ in range(10):
        cadence = _exchanged(cadence, decision_s, changed=True)
        assert cadence.steps == few


@pytest.mark.parametrize(("gain", "steps"), [(-0.1, 25), (0.01, 25), (0.05, 20), (0.3, 10)])
def test_a_decision_may_take_the_part_of_the_time_that_the_latest_change_saves(
    gain: float, steps: int
) -> None:
    after = ExchangeInterval().following(changed=True, step_s=0.1, gain=gain, decision_s=0.1)

    assert after.steps == steps


def test_a_small_gain_postpones_the_next_exchange_of_a_slow_leader() -> None:
    begun, _ = advance(
        Control(policy_from_spec("adaptive:opening_steps=0")), FleetFormed(0, 0, 100, TWO)
    )

    def following(other_s: float) -> int:
        seen = Measurements.of((_seen(0, 50, 0.1, steps=20), _seen(1, 50, other_s, steps=20)))
        _, verdict = advance(begun, Exchanged(4, 5, seen, decision_s=0.1))
        return verdict.exchange_after

    # A tenth of the time for decisions, and a fiftieth.
    assert following(0.5) * 2 < following(0.11)
    assert following(0.1) < following(0.11), "a policy that waits may move soon"


def test_decisions_on_request_are_counted_with_the_steps_that_passed() -> None:
    cadence = ExchangeInterval()
    for _ in range(40):
        cadence = cadence.following(changed=False, step_s=0.1, decision_s=0.02, passed=4)

    assert cadence.following(changed=True, step_s=0.1, decision_s=0.02, passed=4).steps == 10
    assert cadence.excess == cadence.allowance + 1, "calm times must be able to repay it"


def test_unknown_times_change_no_allowance() -> None:
    used = ExchangeInterval(excess=7.0)

    assert used.following(changed=True, step_s=0.0, decision_s=0.02, passed=1).excess == 7.0
    assert used.following(changed=True, step_s=0.1, decision_s=0.0, passed=1).excess == 7.0


def test_a_new_group_renews_the_allowance_of_decisions() -> None:
    control, _ = advance(
        Control(policy_from_spec("adaptive:opening_steps=0")), FleetFormed(0, 0, 10, TWO)
    )
    seen = Measurements.of((_seen(0, 5, 0.1), _seen(1, 5, 0.2)))
    for step in range(1, 30):
        control, _ = advance(control, Exchanged(step, step + 1, seen, decision_s=0.1))
    again, _ = advance(control, FleetFormed(1, 30, 10, TWO))

    assert control.cadence.excess > control.cadence.allowance
    assert again.cadence.excess == 0


def test_an_exchange_with_a_slow_leader_postpones_the_next() -> None:
    control, _ = advance(
        Control(policy_from_spec("adaptive:opening_steps=0")), FleetFormed(0, 0, 10, TWO)
    )
    seen = Measurements.of((_seen(0, 5, 0.1), _seen(1, 5, 0.2)))

    _, quick = advance(control, Exchanged(4, 5, seen, decision_s=0.001))
    _, slow = advance(control, Exchanged(4, 5, seen, decision_s=0.2))

    assert slow.exchange_after > quick.exchange_after
    assert replace(slow, exchange_after=quick.exchange_after) == quick


def test_a_slow_leader_does_not_postpone_an_exchange_for_which_the_next_step_waits() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 10, TWO))
    seen = Measurements.of((_seen(0, 5, 0.1), _seen(1, 5, 0.2)))

    _, verdict = advance(control, Exchanged(2, 2, seen, decision_s=0.2))

    assert (verdict.opening, verdict.exchange_after) == (True, 1)


def test_two_slow_steps_or_one_fast_step_leave_the_band() -> None:
    band = ToleranceBand(share=10, expected_s=1.0, part=0.2)

    assert not band.step(10, 1.19).step(10, 1.3).asked
    assert band.step(10, 1.3).step(10, 1.3).asked
    assert not band.step(10, 1.3).step(10, 1.0).step(10, 1.3).asked
    assert band.step(10, 0.79).asked


def test_deviations_add_up_to_a_request_unless_they_end_with_a_hiccup() -> None:
    band, asked_s = ToleranceBand(share=10, expected_s=0.01, part=0.2), 0.0
    while not band.asked:
        band, asked_s = band.step(10, 0.0115), asked_s + 0.0115

    assert asked_s == pytest.approx(HICCUP_S, abs=0.0115)
    assert not ToleranceBand(10, 0.01, 0.2, slower=1.1, slower_s=0.1).step(10, 0.0115).asked
    assert ToleranceBand(10, 0.01, 0.2, slower=1.1, slower_s=0.2).step(10, 0.0115).asked
    assert ToleranceBand(10, 0.01, 0.2, faster=1.1).step(10, 0.0085).asked


def test_the_band_judges_only_its_own_share_and_asks_once() -> None:
    band = ToleranceBand(share=10, expected_s=1.0, part=0.2)

    assert band.step(11, 9.0).step(11, 9.0) == band
    asked = band.step(10, 0.1)
    assert asked.step(10, 0.1) is asked
    assert ToleranceBand().step(10, 9.0) == ToleranceBand()


def test_the_ledger_records_a_step_when_all_workers_have_reported() -> None:
    ledger = Ledger.empty(2).book(
        Measurements.of((_seen(0, 5, 1.0, steps=3), _seen(1, 5, 3.0, steps=2)))
    )

    assert ledger.steps == 2
    assert ledger.waited_s.tolist() == [4.0, 0.0]
    assert ledger.caused_s.tolist() == [0.0, 4.0]
    assert ledger.slowest_steps.tolist() == [0.0, 2.0]
    assert ledger.took_s == 4.0, "of each step the mean, as no worker waited here"

    later = ledger.book(Measurements.of((_seen(1, 5, 0.5, step=3),)))

    assert later.steps == 3
    assert later.waited_s.tolist() == [4.0, 0.5]
    assert not later.pending.size


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0, 0.0])
def test_impossible_times_are_refused_counted_and_shown(time_s: float) -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))
    reported = Measurements.of((_seen(0, 50, 0.1), _seen(1, 50, time_s)))

    control, (verdict, *_) = advance(control, Exchanged(3, 4, reported))

    assert control.refused == (0, 1)
    assert "ignored 1 invalid report" in verdict.reason  # type: ignore[union-attr]
    assert control.estimate is not None
    assert control.estimate.steps.tolist() == [1, 0], "nothing was learned from it"

    fleet = FleetFormed(1, 4, 100, (Worker("newcomer"), TWO[1]))
    assert advance(control, fleet)[0].refused == (0, 1), "a worker that stays keeps its count"


@pytest.mark.parametrize(
    ("worker", "share", "counted"),
    [(1, 101, (0, 1)), (1, 2**62, (0, 1)), (1, -3, (0, 1)), (2, 50, (0, 0)), (-1, 50, (0, 0))],
)
def test_shares_and_workers_that_cannot_be_are_refused(
    worker: int, share: int, counted: tuple[int, int]
) -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))
    reported = Measurements.of((_seen(0, 50, 0.1), _seen(worker, share, 0.1)))

    control, (verdict, *_) = advance(control, Exchanged(3, 4, reported))

    assert control.refused == counted
    assert "ignored 1 invalid report" in verdict.reason  # type: ignore[union-attr]
    assert control.estimate is not None
    assert control.estimate.steps.tolist() == [1, 0], "nothing was learned from it"


def test_a_changed_fleet_keeps_the_estimates_of_the_workers_that_stay() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 100, TWO))
    reported = Measurements.of((_seen(0, 50, 0.05), _seen(1, 50, 0.2)))
    control, _ = advance(control, Exchanged(3, 4, reported))

    newcomer = Worker("newcomer")
    control, (opening, *_) = advance(control, FleetFormed(1, 4, 90, (*TWO, newcomer)))

    assert isinstance(opening, SetShares)
    assert opening.shares[0] > 2 * opening.shares[1], "the fast one is known to be fast"
    assert opening.shares[0] > opening.shares[2] >= opening.shares[1], "the new one is no better"


@dataclass(frozen=True)
class Given:
    """A user's policy that returns its shares unchanged."""

    first: Any
    later: Any
    opening_steps: int = 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:  # noqa: ARG002
        return None, Move(self.first, "first")

    def decide(self, state: None, situation: Situation) -> tuple[None, Move]:  # noqa: ARG002
        return None, Move(self.later, "later")


def test_every_step_may_wait_for_its_decision_however_settled_the_policy_is() -> None:
    control, _ = advance(Control(Given((6, 6), (5, 7), EVERY_STEP)), FleetFormed(0, 0, 12, TWO))
    seen = Measurements.of((_seen(0, 6, 0.1), _seen(1, 6, 0.1)))

    for step in range(2, 30):
        control, (*_, after) = advance(control, Exchanged(step, step, seen))
        assert after == ExchangeAfter(1, True)

    notice = MembersChanged(30, 31, (Happening("a", MembershipEvent.NOTICE, left_s=30.0),))
    control, _ = advance(control, notice)
    control, (*_, after) = advance(control, Exchanged(34, 34, seen))
    assert after == ExchangeAfter(1, True), "it goes on with the others"


@pytest.mark.parametrize("shares", [(6, 7), (12,), (4, 4, 4), (-1, 13), (6.0, 6.0), ()])
def test_shares_that_do_not_split_the_batch_are_refused(shares: Any) -> None:
    with raises_message(ConfigError, "Given", "12"):
        advance(Control(Given(shares, (6, 6))), FleetFormed(0, 0, 12, TWO))

    control, _ = advance(Control(Given((6, 6), shares)), FleetFormed(0, 0, 12, TWO))
    seen = Measurements.of((_seen(0, 6, 0.1), _seen(1, 6, 0.1)))
    with raises_message(ConfigError, "Given", "12"):
        advance(control, Exchanged(4, 5, seen))


def test_a_share_between_0_and_min_share_is_refused() -> None:
    members = (Worker("a", min_share=4), Worker("b"))
    for shares in ((4, 8), (0, 12)):
        advance(Control(Given(shares, shares)), FleetFormed(0, 0, 12, members))

    with raises_message(ConfigError, "Given", "share of 3", "worker a", "min_share of 4"):
        advance(Control(Given((3, 9), (4, 8))), FleetFormed(0, 0, 12, members))


def test_an_opening_above_max_share_is_narrowed() -> None:
    members = (Worker("a", max_share=5), Worker("b"))

    control, _ = advance(Control(Given((8, 4), (8, 4))), FleetFormed(0, 0, 12, members))

    assert control.shares == (5, 7)


def test_shares_of_numpy_become_python_integers() -> None:
    control, _ = advance(Control(Given(np.array([5, 7]), (6, 6))), FleetFormed(0, 0, 12, TWO))

    assert control.shares == (5, 7)
    assert {type(share) for share in control.shares} == {int}
