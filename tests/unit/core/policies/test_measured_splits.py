"""Splits are compared by measured steps, and a worse one is left, whatever the model predicts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstride.core.fleet import Fleet, Shares, Worker
from evenstride.core.policies.adaptive import AdaptiveState
from evenstride.core.policies.measured_splits import Supervisor
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from evenstride.core.time_model.observation import Measurements, Observation, whole_steps
from evenstride.sim.scoring.suite import ScoredScenario
from tests.unit.sim.clusters import scenario

FLEET = Fleet(tuple(Worker(f"host/{rank}") for rank in range(3)), 30)
EQUAL, OTHER, THIRD = (10, 10, 10), (8, 11, 11), (9, 10, 11)
# Small noise, and workers whose new shares cost nothing.
KNOWN = Estimate.unknown(3).knowing(
    slice(None),
    CurveEstimates.certain(np.zeros(3), np.full(3, 0.01)),
    np.full(3, 0.02**2),
    np.full(3, 9),
)


class Run:
    """Steps at given splits with given times, and what the supervisor decides after each."""

    def __init__(self) -> None:
        self.state, self.step, self.estimate = Supervisor(), 0, KNOWN

    def at(self, shares: Shares, *steps_s: Sequence[float]) -> Decision | None:
        decision = None
        for times_s in steps_s:
            seen = [Observation(k, shares[k], self.step, (times_s[k],), (0.0,)) for k in range(3)]
            decision = self.decide(shares, Measurements.of(seen))
            if isinstance(decision, Move):
                break
        return decision

    def decide(self, shares: Shares, seen: Measurements) -> Decision | None:
        self.step += 1
        situation = Situation(FLEET, shares, self.step, seen, self.estimate)
        self.state, decision = self.state.after(situation).judged(situation)
        return decision


USUAL, FASTER, SLOWER = (0.1, 0.1, 0.1), (0.08, 0.08, 0.08), (0.08, 0.2, 0.1)


def test_a_split_whose_steps_are_longer_is_left_after_its_second_step() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    first, second = run.at(OTHER, SLOWER), run.at(OTHER, SLOWER)

    assert isinstance(first, Keep)
    assert not first.settled
    assert isinstance(second, Move)
    assert second.shares == EQUAL


def test_a_faster_split_is_kept_and_becomes_the_one_to_compare_with() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    assert run.at(OTHER, *[FASTER] * 6) is None
    back = run.at(THIRD, *[(0.1, 0.08, 0.08)] * 4)

    assert isinstance(back, Move)
    assert back.shares == OTHER


def test_a_slow_first_step_is_no_evidence() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, (0.9, 0.9, 0.9))

    assert run.at(OTHER, *[FASTER] * 6) is None


def test_a_spike_is_no_evidence() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    assert run.at(OTHER, FASTER, (0.08, 0.3, 0.08), FASTER, FASTER) is None


def test_spikes_of_different_workers_are_no_evidence() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    assert run.at(OTHER, FASTER, (0.08, 0.3, 0.08), (0.08, 0.08, 0.3), (0.3, 0.08, 0.08)) is None


def test_a_slow_down_of_all_workers_is_not_the_splits_fault() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    # The first worker has fewer samples, and is slower nevertheless.
    assert not isinstance(run.at(OTHER, *[(0.2, 0.2, 0.2)] * 6), Move)


def test_a_split_that_is_slow_in_every_second_step_takes_the_mean() -> None:
    run = Run()
    run.at(EQUAL, *[(0.2, 0.1, 0.1), USUAL] * 8)

    assert not isinstance(run.at(OTHER, *[(0.11, 0.12, 0.12)] * 20), Move)


def test_a_slow_down_after_some_steps_is_not_the_splits_fault() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    # At first, steps are hardly longer, which says nothing about what follows.
    assert not isinstance(run.at(OTHER, *[(0.08, 0.1008, 0.1)] * 3), Move)

    assert not isinstance(run.at(OTHER, *[(0.08, 0.14, 0.1)] * 9), Move)


def test_a_worker_that_became_slower_at_one_share_would_be_so_at_others() -> None:
    def leaving(slower: float) -> Decision | None:
        run = Run()
        run.at(EQUAL, *[USUAL] * 5)
        run.at(OTHER, *[(0.08, 0.101, 0.101)] * 3, (0.08, 0.3, 0.101))
        seen = replace(KNOWN.seen, slower=np.log([1.0, slower, 1.0]))
        run.estimate = replace(KNOWN, seen=seen)
        return run.at((13, 4, 13), *[(0.14, 0.13, 0.14)] * 4)

    assert isinstance(leaving(1.0), Move)
    assert not isinstance(leaving(3.0), Move)


def test_a_worker_that_became_slower_would_be_so_with_equal_shares() -> None:
    def leaving(slower: float) -> Decision | None:
        run = Run()
        run.at(EQUAL, *[USUAL] * 5)
        run.at((12, 6, 12), *[(0.09, 0.05, 0.09)] * 5)
        run.estimate = replace(KNOWN, seen=replace(KNOWN.seen, slower=np.log([slower, 1.0, 1.0])))
        run.at((12, 6, 12), (0.27, 0.05, 0.09))
        return run.at((11, 7, 12), *[(0.25, 0.06, 0.09)] * 8)

    back = leaving(1.0)
    assert isinstance(back, Move)
    assert back.shares == EQUAL
    assert not isinstance(leaving(3.0), Move)


def test_a_split_that_was_left_because_of_a_slow_down_counts_as_slow() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5, (0.3, 0.1, 0.1))

    assert not isinstance(run.at(OTHER, *[(0.2, 0.11, 0.11)] * 6), Move)


def test_where_speeds_have_just_changed_a_slower_split_needs_more_evidence() -> None:
    run = Run()
    # Other splits are left because a worker has become slower: about twice in a hundred steps.
    for shares in (THIRD, EQUAL):
        run.at(shares, *[USUAL] * 5, (0.1, 0.2, 0.1))

    run.at(THIRD, *[USUAL] * 5)
    for _ in range(4):
        assert not isinstance(run.at(OTHER, SLOWER), Move)

    assert isinstance(run.at(OTHER, *[SLOWER] * 8), Move)


def _failed(run: Run) -> int:
    """Let a split fail, and return for how many steps the shares then stay."""
    while not isinstance(run.at(OTHER, SLOWER), Move):
        pass
    begun = run.step
    while isinstance(run.at(EQUAL, USUAL), Keep):
        pass
    return run.step - begun


def test_the_shares_stay_longer_each_time_until_the_cost_is_repaid() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)

    first, second = _failed(run), _failed(run)

    # Two steps of twice the time, the first of which may belong to the share, at 0.5 %.
    assert first >= 200
    assert second >= 2 * first


def test_reasons_say_what_was_measured_and_for_how_long_the_shares_stay() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    back = run.at(OTHER, SLOWER, SLOWER)
    kept = run.at(EQUAL, USUAL)

    assert isinstance(back, Move)
    assert "100.0% longer" in back.reason
    assert isinstance(kept, Keep)
    assert "until step" in kept.reason
    assert "slower than with equal shares" in kept.reason


def test_a_changed_speed_ends_the_wait() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, SLOWER, SLOWER)

    assert isinstance(run.at(EQUAL, *[USUAL] * 5), Keep)
    assert run.at(EQUAL, *[(0.1, 0.1, 0.3)] * 4) is None


def test_a_speed_that_was_found_to_have_changed_ends_the_wait_among_noise() -> None:
    def waits(slower: float, other_s: float = 0.15) -> bool:
        run = Run()
        run.estimate = replace(KNOWN, noise=np.full(3, 0.12**2))
        run.at(EQUAL, *[USUAL] * 5)
        run.at(OTHER, *[(0.08, 0.3, 0.1)] * 4)
        assert isinstance(run.at(EQUAL, *[USUAL] * 5), Keep)
        seen = replace(KNOWN.seen, slower=np.log([1.0, 1.0, slower]))
        run.estimate = replace(run.estimate, seen=seen)
        # Alone, three such steps may be noise.
        return isinstance(run.at(EQUAL, *[(0.1, 0.1, other_s)] * 4), Keep)

    assert waits(1.0)
    assert not waits(1.5)
    assert waits(1.5, 0.1), "its own times contradict it"


def test_a_return_to_a_split_that_has_become_slower_is_undone_at_once() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, SLOWER, SLOWER)

    assert run.at(EQUAL, *[(0.4, 0.1, 0.1)] * 2) is None


def test_small_losses_against_the_equal_split_are_bounded() -> None:
    run, dice = Run(), np.random.default_rng(0)
    run.at(EQUAL, *[USUAL] * 16)
    lost = 0
    # Steps of so much noise that no short comparison shows 3 %.
    for _ in range(1000):
        noise = np.exp(0.1 * dice.standard_normal(3)) * 0.103
        if isinstance(run.at(OTHER, tuple(noise)), Move):
            break
        lost += 1

    assert lost < 300


def test_late_measurements_of_the_split_that_was_left_change_nothing() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, SLOWER, SLOWER)

    late = [Observation(k, OTHER[k], 50, (SLOWER[k],), (0.0,)) for k in range(3)]
    assert isinstance(run.decide(EQUAL, Measurements.of(late)), Keep)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_partly_reported_and_flagged_steps_are_left_out(missing: int) -> None:
    whole = [Observation(k, EQUAL[k], 0, (0.1, 0.2), (0.0, 0.0)) for k in range(3)]
    part = [Observation(k, EQUAL[k], 2, (0.3,), (0.0,)) for k in range(3) if k != missing]
    odd = [Observation(k, EQUAL[k], 3, (0.4,), (0.0,), modelled=k != missing) for k in range(3)]

    (seen,) = whole_steps(Measurements.of([*whole, *part, *odd]), 3, 30)

    assert seen.busy_s.tolist() == [[0.1] * 3, [0.2] * 3]


def test_its_state_can_be_pickled_and_compared() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, SLOWER, SLOWER)

    assert pickle.loads(pickle.dumps(run.state)) == run.state
    assert run.state != Supervisor()


def _against_equal(**values: Any) -> float:
    """Return the time of the equal split over that of the policy."""
    stage = ScoredScenario.of(scenario(**values), 1)
    return float(stage.run("uniform")[1].real_s.sum() / stage.run("adaptive")[1].real_s.sum())


@pytest.mark.parametrize("waves", [1, 4, 16])
def test_where_equal_shares_are_best_nothing_is_lost(waves: int) -> None:
    speeds = np.random.default_rng(waves).uniform(2000, 2060, 4)
    workers = [
        {"name": f"w{n}", "samples_per_s": float(speed), "noise": 0.02, "wave": 32}
        for n, speed in enumerate(speeds)
    ]

    ahead = _against_equal(
        global_batch=4 * 32 * waves, steps=300, workers=workers, exchange={"lag": 1}
    )
    assert ahead > 0.985


def test_a_cliff_is_met_once() -> None:
    speeds = np.random.default_rng(10).uniform(2000, 2300, 4)
    group = {"fixed_s": 0.01, "noise": 0.02, "cliff_at": 66, "cliff_factor": 10.0}
    workers = [
        {"name": f"w{n}", "samples_per_s": float(speed), **group} for n, speed in enumerate(speeds)
    ]

    ahead = _against_equal(global_batch=256, steps=300, workers=workers, exchange={"lag": 3})
    assert ahead > 0.8


def test_a_cliff_that_is_met_again_and_again_ends_at_equal_shares() -> None:
    cliff = {"count": 4, "noise": 0.08, "cliff_at": 8, "cliff_factor": 6.0}
    workers = [
        {"name": "fast", "samples_per_s": 260, "fixed_s": 0.005, **cliff},
        {"name": "slow", "samples_per_s": 135, "fixed_s": 0.022, "count": 4, "noise": 0.05},
    ]

    # Each crossing lasts for eight steps, which cost as much as fifty.
    ahead = _against_equal(global_batch=64, steps=300, workers=workers, exchange={"lag": 8})
    assert ahead > 0.7


def test_small_losses_at_many_splits_are_bounded_together() -> None:
    run, factors = Run(), (0.9, 1.0, 1.17)
    run.at(EQUAL, *[(0.1 * factors[step % 3],) * 3 for step in range(17)])
    # No split is in force long enough to be compared alone, and times differ by much more than the
    # 3 % that the steps are longer.
    splits = [(8, 11, 11), (9, 10, 11), (11, 9, 10), (11, 10, 9)]
    lost, decision = 0, None
    while not isinstance(decision, Move) and lost < 1000:
        shares, longest_s = splits[lost // 4 % 4], 0.103 * factors[lost % 3]
        decision = run.at(shares, [longest_s if share > 10 else 0.08 for share in shares])
        lost += 1

    assert isinstance(decision, Move)
    assert decision.shares == EQUAL
    assert 30 < lost < 300


def test_a_trial_may_cost_a_small_part_of_a_large_gain() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, *[(0.03, 0.03, 0.03)] * 40)

    situation = Situation(FLEET, OTHER, run.step, Measurements.of(()), KNOWN)
    assert 0.0 < run.state.risk(situation) < 0.15


def _lost(run: Run) -> None:
    """Lose more than a run may at a split that is worse than the equal one."""
    run.at(EQUAL, *[USUAL] * 5)
    run.step += 10
    run.at(OTHER, (0.08, 2.5, 0.1), (0.08, 2.5, 0.1))
    assert run.state.overdrawn


def test_a_run_that_has_lost_too_much_is_pardoned_twice() -> None:
    run = Run()
    _lost(run)

    state = run.state.forgiven(new=False)
    assert (state.hold, state.pardons) == (None, 0)
    assert state.pardonable
    twice = state.forgiven(new=True).forgiven(new=True)
    assert twice.overdrawn
    assert not twice.pardonable
    assert replace(twice, regret_s=0.0).pardonable


def test_discoveries_do_not_end_the_wait_of_a_run_that_has_lost_too_much() -> None:
    run = Run()
    _lost(run)
    tried = replace(run.state, pardons=2)
    found = replace(KNOWN, seen=replace(KNOWN.seen, tries=np.array([1, 0, 0])))
    situation = Situation(FLEET, EQUAL, run.step, Measurements.of(()), found)

    assert AdaptiveState(supervisor=run.state).after(situation).supervisor.hold is None
    assert AdaptiveState(supervisor=tried).after(situation).supervisor.hold is not None


def test_only_a_lasting_change_of_speed_ends_the_wait_of_a_run_that_has_lost_too_much() -> None:
    run = Run()
    _lost(run)

    for _ in range(3):  # slow spells
        run.at(EQUAL, *[(0.04, 0.05, 0.1)] * 20)
        run.at(EQUAL, *[USUAL] * 5)
    waits = run.state.hold is not None
    run.at(EQUAL, *[(0.04, 0.05, 0.1)] * 40)

    assert waits
    assert run.state.hold is None


def test_nothing_was_lost_if_the_equal_split_has_become_slower() -> None:
    run = Run()
    _lost(run)

    kept = [run.at(EQUAL, (3.0, 3.0, 3.0)) for _ in range(33)]

    assert isinstance(kept[-2], Keep), "it may be a slow spell"
    assert run.state.hold is None
    assert run.state.regret_s <= 0


def test_another_split_that_has_become_slower_leaves_what_was_lost() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    run.at(OTHER, *[FASTER] * 6)
    run.at((8, 10, 12), (0.08, 0.08, 2.5), (0.08, 0.08, 2.5))
    assert run.state.better is not None
    assert run.state.better.shares.tolist() == list(OTHER)

    # It ends the wait at that split, not the bound on what may be lost against the equal one.
    back = run.at(OTHER, *[(3.0, 3.0, 3.0)] * 3)

    assert isinstance(back, Move)
    assert back.shares == EQUAL
    assert run.state.regret_s > 2


def test_losses_are_counted_while_speeds_recur() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    state = AdaptiveState(supervisor=run.state, recurs=True)
    for step in range(5, 9):
        seen = [Observation(k, OTHER[k], step, (SLOWER[k],), (0.0,)) for k in range(3)]
        state = replace(
            state.after(Situation(FLEET, OTHER, step, Measurements.of(seen), KNOWN)), recurs=True
        )

    # The first step may have been slow because its shares were new.
    assert state.supervisor.lost_s == pytest.approx(3 * 0.1)


def test_after_splits_for_different_speeds_only_the_run_is_known() -> None:
    run = Run()
    run.at(EQUAL, *[USUAL] * 5)
    _failed(run)
    run.at(THIRD, SLOWER)
    assert run.state.failures
    assert run.state.lost_s > 0

    situation = Situation(FLEET, THIRD, run.step, Measurements.of(()), KNOWN)
    after = AdaptiveState(supervisor=run.state, recurs=True).after(situation).supervisor

    assert (after.better, after.away, after.hold, after.failures) == (None, None, None, 0)
    assert (after.equal, after.lost_s) == (run.state.equal, run.state.lost_s)
    assert AdaptiveState(supervisor=run.state).after(situation).supervisor.failures


def test_splits_for_different_speeds_are_not_compared() -> None:
    half = {"kind": "periodic", "at": 0, "workers": [0, 1], "speed": 0.5, "period": 16}
    workers = [{"name": "node", "count": 8, "samples_per_s": 1000, "fixed_s": 0.01, "noise": 0.02}]
    made = scenario(
        workers=workers, global_batch=512, steps=200, exchange={"lag": 8}, events=[half]
    )

    _, track = ScoredScenario.of(made, 0).run("adaptive")

    late = [one.reason for one in track.decisions if one.step > 80]
    assert len(late) > 10
    assert all(reason.startswith("speeds change back and forth every 16") for reason in late)
