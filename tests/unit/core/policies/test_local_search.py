"""While curves have failed, late workers give samples to early ones, and measured steps decide."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.fleet import Fleet, Shares, Worker
from evenstride.core.policies.local_search import LocalSearch
from evenstride.core.policies.measured_splits import Hold, Supervisor, Tried
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from evenstride.core.time_model.observation import Measurements, Observation

FLEET = Fleet(tuple(Worker(f"host/{rank}") for rank in range(3)), 96)
EQUAL = (32, 32, 32)
KNOWN = Estimate.unknown(3).knowing(
    slice(None),
    CurveEstimates.certain(np.zeros(3), np.full(3, 0.01)),
    np.full(3, 0.02**2),
    np.full(3, 9),
)
Times = Callable[[Shares], Sequence[float]]


def _proportional(shares: Shares) -> Sequence[float]:
    return [shares[0] * 0.02, shares[1] * 0.01, shares[2] * 0.01]


def _never_shorter(shares: Shares) -> Sequence[float]:
    return [0.64, *(0.32 if share <= 32 else 0.8 for share in shares[1:])]


class Run:
    """A run that waits at the equal split after some failures, with times by the shares."""

    def __init__(self, times: Times, failures: int = 2, fleet: Fleet = FLEET) -> None:
        self.times, self.fleet, self.step = times, fleet, 0
        self.shares: Shares = EQUAL
        self.search, self.supervisor, self.estimate = LocalSearch(), Supervisor(), KNOWN
        self.reasons, self.spent_s, self.slower = list[str](), 0.0, 1.0
        for _ in range(4):
            self.measure()
        kept = self.supervisor.better
        assert isinstance(kept, Tried)
        hold = Hold(self.step, 10_000, "slow", kept, float(np.log(9.0)))
        self.supervisor = replace(self.supervisor, hold=hold, failures=failures)

    def measure(self) -> Situation:
        times_s = [self.slower * one for one in self.times(self.shares)]
        self.spent_s += max(times_s)
        seen = [Observation(k, self.shares[k], self.step, (times_s[k],), (0.0,)) for k in range(3)]
        self.step += 1
        now = Situation(self.fleet, self.shares, self.step, Measurements.of(seen), self.estimate)
        self.supervisor = self.supervisor.after(now)
        return now

    def steps(self, count: int) -> Decision | None:
        """Train some steps, deciding as `Adaptive` does; return the last decision."""
        decision = None
        for _ in range(count):
            now = self.measure()
            self.supervisor, decision = self.supervisor.judged(now)
            if self.supervisor.hold is not None and isinstance(decision, Keep):
                limit = self.estimate.seen.limit
                found = self.search.decide(now, self.supervisor, limit)
                if found is not None:
                    self.search, self.supervisor, decision = found
            if decision is not None:
                self.reasons.append(decision.reason)
            if isinstance(decision, Move):
                self.shares = decision.shares
        return decision

    def until_on_trial(self) -> None:
        while self.shares == EQUAL:
            assert self.step < 1000
            self.steps(1)

    @property
    def searched(self) -> list[str]:
        return [reason for reason in self.reasons if reason.startswith("local search")]


def test_a_late_worker_gives_samples_until_all_finish_together() -> None:
    run = Run(_proportional)

    run.steps(200)

    # The best split takes 0.384 s, the equal one 0.64 s.
    assert max(run.times(run.shares)) < 0.42
    assert any("shorter" in reason for reason in run.reasons)


def test_nothing_is_tried_while_the_curves_may_be_right() -> None:
    run = Run(_proportional, failures=1)

    run.steps(100)

    assert run.shares == EQUAL
    assert not run.searched


def test_the_search_ends_with_the_wait() -> None:
    run = Run(_proportional)
    run.supervisor = replace(run.supervisor, hold=None)

    run.steps(100)

    assert not run.searched


def test_steps_that_are_longer_are_left_at_once_and_cost_a_small_part_of_the_run() -> None:
    run = Run(_never_shorter)

    run.steps(3000)

    assert run.spent_s < 0.64 * 3004 * 1.01
    assert any("not measured shorter" in reason for reason in run.reasons)
    assert sum("on trial" in reason and "fewer" in reason for reason in run.reasons) < 10


def test_a_known_cliff_is_a_limit() -> None:
    run = Run(_proportional)
    workers = np.array([1, 2])
    cliffs = np.array([[32.0, 33.0], [40.0, 40.0], [9.0, 9.0]])
    seen = run.estimate.seen.shaped(workers, np.array([1, 1]), cliffs)
    run.estimate = replace(run.estimate, seen=seen)

    run.steps(100)

    assert run.shares == (31, 32, 33)


@pytest.mark.parametrize("quantum", [1, 8])
def test_shares_are_whole_quanta_within_their_bounds(quantum: int) -> None:
    workers = tuple(Worker(f"host/{rank}", quantum=quantum, min_share=16) for rank in range(3))
    run = Run(_proportional, fleet=Fleet(workers, 96))

    run.steps(200)

    assert run.shares != EQUAL
    assert min(run.shares) >= 16
    assert all(share % quantum == 0 for share in run.shares)


def test_equal_times_leave_nothing_to_shift() -> None:
    run = Run(lambda _: [0.3, 0.3, 0.3])

    run.steps(100)

    assert not run.searched


def test_its_state_can_be_pickled_and_compared() -> None:
    run = Run(_proportional)

    run.until_on_trial()
    run.steps(4)

    assert pickle.loads(pickle.dumps(run.search)) == run.search


def test_a_trial_ends_also_where_the_curves_may_be_right_again() -> None:
    run = Run(_never_shorter)
    run.until_on_trial()

    # As where a run has regained what it had lost.
    run.supervisor = replace(run.supervisor, failures=0)
    run.steps(8)

    assert run.shares == EQUAL


def test_a_trial_does_not_change_how_long_the_shares_stay() -> None:
    run = Run(_never_shorter)
    run.until_on_trial()
    assert run.supervisor.hold is not None
    until = run.supervisor.hold.until

    run.steps(8)

    assert run.shares == EQUAL
    assert run.supervisor.hold is not None
    assert run.supervisor.hold.until == until


def test_shares_that_memory_has_narrowed_on_trial_are_left() -> None:
    run = Run(_proportional)
    run.until_on_trial()

    first, second, third = run.shares
    run.shares = (first + 1, second - 1, third)
    run.steps(1)

    assert run.shares == EQUAL


def test_each_wait_has_a_search_of_its_own() -> None:
    run = Run(_never_shorter)
    run.steps(200)
    assert run.search.failures > 0
    assert run.supervisor.hold is not None

    again = replace(run.supervisor.hold, begun=run.step, trial=None)
    run.supervisor = replace(run.supervisor, hold=again)
    run.until_on_trial()

    assert run.search.failures == 0


def test_new_shares_are_tried_once_their_first_step_has_been_earned() -> None:
    run = Run(_proportional)
    firsts = replace(run.estimate.firsts, extra_s=np.full(3, 1.0))
    run.estimate = replace(run.estimate, firsts=firsts)

    run.until_on_trial()

    # 1 s at 0.5 % of a step of 0.64 s.
    assert run.step > 1.0 / (0.005 * 0.64)


def test_a_split_that_stays_is_left_for_the_equal_one_beyond_the_bound() -> None:
    run = Run(lambda shares: [0.64, 0.32, 0.32] if shares == EQUAL else [0.3, 0.9, 0.3])
    run.shares = (16, 48, 32)
    run.supervisor = replace(run.supervisor, hold=None)
    for _ in range(4):
        run.measure()
    assert run.supervisor.away is not None
    kept = run.supervisor.away.now
    hold = Hold(run.step, 10_000, "slow", kept, float(np.log(9.0)))
    stays = replace(run.supervisor, better=kept, away=None, hold=hold)

    run.supervisor = stays
    run.steps(1)
    assert run.shares == (16, 48, 32)

    run.supervisor = replace(stays, regret_s=1000.0)
    run.steps(1)
    assert run.shares == EQUAL


def test_a_spike_before_a_trial_does_not_make_it_the_better_split() -> None:
    run = Run(lambda shares: [0.64, 0.4, 0.4] if shares == EQUAL else [0.69, 0.4, 0.4])
    run.steps(15)
    assert run.shares == EQUAL
    run.slower = 1.5
    run.steps(1)
    assert run.shares != EQUAL
    run.slower = 1.0
    run.steps(40)

    assert run.shares == EQUAL
    assert not any("shorter" in reason and "not" not in reason for reason in run.searched)


def test_a_slow_first_step_does_not_end_a_trial() -> None:
    warm: set[Shares] = {EQUAL}

    def times(shares: Shares) -> Sequence[float]:
        first_s = 0.0 if shares in warm else 1.0
        warm.add(shares)
        return [first_s + one for one in _proportional(shares)]

    run = Run(times)
    run.until_on_trial()
    run.steps(12)

    assert any("shorter" in reason for reason in run.searched)
    assert run.shares != EQUAL
