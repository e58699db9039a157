"""Average speeds are followed where the measured steps say so, and nowhere else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstride.core.fleet import Shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.speed_averages import SpeedAverages
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.kalman import with_recent
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.sim.engine.lockstep import Simulation
from tests.unit.core.policies.test_measured_splits import EQUAL, FLEET, KNOWN
from tests.unit.sim.clusters import scenario

LARGER = (2, 14, 14)
OWN = Keep("as the curves say")


class Run:
    """Steps of three workers whose curves are never corrected, and the decisions after each."""

    def __init__(self) -> None:
        self.state, self.step, self.estimate = SpeedAverages(), 0, KNOWN

    def after(self, shares: Shares, slower: tuple[float, float, float]) -> Decision:
        times_s = [0.01 * share * factor for share, factor in zip(shares, slower, strict=True)]
        self.step += 1
        seen = Measurements.of(
            Observation(k, shares[k], self.step, (times_s[k],), (0.0,)) for k in range(3)
        )
        self.estimate = replace(self.estimate, recent=with_recent(self.estimate.recent, seen))
        situation = Situation(FLEET, shares, self.step, seen, self.estimate)
        self.state, decision = self.state.decide(situation, OWN)
        return decision


def test_average_speeds_are_followed_once_they_would_have_been_better() -> None:
    run = Run()
    run.after(LARGER, (1.0, 1.0, 1.0))

    first, *others = [run.after(EQUAL, (2.0, 1.0, 1.0)) for _ in range(40)]

    assert first == OWN
    move = others[-1]
    assert isinstance(move, Move)
    assert move.shares == (6, 12, 12)
    assert "by average speeds" in move.reason
    assert not move.settled


def test_no_worker_gets_much_more_than_it_has_had() -> None:
    run = Run()

    *_, last = [run.after(EQUAL, (9.0, 1.0, 1.0)) for _ in range(40)]

    assert isinstance(last, Move)
    assert last.shares == (6, 12, 12), "what 13 samples take is not known"


def test_curves_are_followed_where_speeds_only_seem_to_change() -> None:
    run, rng = Run(), np.random.default_rng(0)
    run.after(LARGER, (1.0, 1.0, 1.0))

    decisions = [run.after(EQUAL, tuple(np.exp(rng.normal(0, 0.1, 3)))) for _ in range(200)]

    assert set(decisions) == {OWN}


def test_averages_of_times_do_not_follow_curves_that_move() -> None:
    calm, misled = Run(), Run()
    for _ in range(3):
        calm.after(EQUAL, (1.0, 1.0, 1.0))
        misled.after(EQUAL, (1.0, 1.0, 1.0))

    misled.estimate = replace(KNOWN, now=KNOWN.now.times(2.0, np.zeros(3)))
    misled.after(EQUAL, (1.0, 1.0, 1.0))

    assert 2.0 * misled.state.times == pytest.approx(calm.state.times)


@pytest.mark.parametrize("aside", [True, False])
def test_averages_follow_curves_that_move_during_other_steps(aside: bool) -> None:
    run = Run()
    for _ in range(3):
        run.after(EQUAL, (1.0, 1.0, 1.0))

    recent = run.estimate.recent
    run.estimate = replace(KNOWN, now=KNOWN.now.times(2.0, np.zeros(3)), recent=recent)
    if aside:
        run.state = run.state.aside()
    else:
        unusable = Situation(FLEET, EQUAL, run.step, Measurements.of(()), run.estimate)
        run.state, _ = run.state.decide(unusable, OWN)
    run.after(EQUAL, (2.0, 2.0, 2.0))

    assert run.state.times == pytest.approx(np.ones((4, 3)))


def test_curves_are_followed_again_after_other_steps() -> None:
    run = Run()
    run.after(LARGER, (1.0, 1.0, 1.0))
    for _ in range(40):
        run.after(EQUAL, (2.0, 1.0, 1.0))
    assert run.state.used

    run.state = run.state.aside()

    assert not run.state.used
    assert not run.state.plans


def _reasons(**more: Any) -> str:
    kind = {"name": "kind", "count": 4, "samples_per_s": 3600.0, "noise": 0.05, **more}
    walk = {"kind": "walk", "at": 0, "workers": "all", "spread": 0.02}
    made = scenario(workers=[kind], global_batch=64, steps=200, events=[walk])
    run = Simulation(made, policy_from_spec("adaptive"), 0).run()
    return "\n".join(decided.reason for decided in run.decisions)


def test_adaptive_follows_averages_only_where_new_shares_are_free() -> None:
    assert "average speeds" in _reasons()
    assert "average speeds" not in _reasons(new_share_s=0.05)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_state_can_be_stored(steps: int) -> None:
    run = Run()
    for _ in range(steps):
        run.after(EQUAL, (2.0, 1.0, 1.0))

    stored = pickle.loads(pickle.dumps(run.state))

    assert (stored.times == run.state.times).all()
    assert (stored.compared == run.state.compared).all()
