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
from evenstride.core.policy import Decision, Move, Situation
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
        self.reasons, self.spent_s = list[str](), 0.0
        for _ in range(4):
            self._measure()
        kept = self.supervisor.better
        assert isinstance(kept, Tried)
        hold = Hold(self.step, 10_000, "slow", kept, float(np.log(9.0)))
        self.supervisor = replace(self.supervisor, hold=hold, failures=failures)

    def _measure(self) -> Situation:
        times_s = self.times(self.shares)
        self.spent_s += max(times_s)
        seen = [Observation(k, self.shares[k], self.step, (times_s[k],), (0.0,)) for k in range(3)]
        self.step += 1
        now = Situation(self.fleet, self.shares, self.step, Measurements.of(seen), self.estimate)
        self.supervisor = self.supervisor.after(now)
        return now

    def steps(self, count: int) -> Decision | None:
        found = None
        for _ in range(count):
            found = self.search.decide(self._measure(), self.supervisor)
            if found is None:
                continue
            self.search, self.supervisor, decision = found
            self.reasons.append(decision.reason)
            if isinstance(decision, Move):
                self.shares = decision.shares
        return None if found is None else found[2]


def test_a_late_worker_gives_samples_until_all_finish_together() -> None:
    run = Run(_proportional)

    run.steps(200)

    # The best split takes 0.384 s, the equal one 0.64 s.
    assert max(run.times(run.shares)) < 0.42
    assert any("shorter" in reason for reason in run.reasons)


def test_nothing_is_tried_while_the_curves_may_be_right() -> None:
    run = Run(_proportional, failures=1)

    assert run.steps(100) is None
    assert run.shares == EQUAL


def test_the_search_ends_with_the_wait() -> None:
    run = Run(_proportional)
    run.supervisor = replace(run.supervisor, hold=None)

    assert run.steps(100) is None


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

    assert run.steps(100) is None


def test_its_state_can_be_pickled_and_compared() -> None:
    run = Run(_proportional)

    assert isinstance(run.steps(16), Move)
    assert pickle.loads(pickle.dumps(run.search)) == run.search
