"""``adaptive:allow_idle=1``: who holds up the others is left out, tried again, and comes back."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Worker, as_shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.adaptive import Adaptive, least_shares
from evenstride.core.policy import Move, Situation
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError
from evenstride.sim.engine.lockstep import SimulatedSteps, Simulation
from evenstride.sim.scenario.scenario_model import Scenario
from tests.contract.fleets import fleets, observations, splits
from tests.messages import raises_message
from tests.unit.core.policies.plant import Plant

IDLE, NEVER = "adaptive:allow_idle=1", "adaptive"


class Ghosts(Plant):
    """Workers that run one sample where they have a share of 0, as real ones do."""

    def __init__(
        self,
        fixed_s: Sequence[float],
        per_sample_s: Sequence[float],
        spec: str = IDLE,
        lag: int = 1,
        **bounds: int | None,
    ) -> None:
        limits = {"min_share": 8, **bounds}
        names = [f"host/{rank}" for rank in range(len(fixed_s))]
        members = tuple(Worker(name, **limits) for name in names)  # type: ignore[arg-type]
        super().__init__(spec, 256, fixed_s, per_sample_s, lag=lag, members=members)
        self.took_s = 0.0
        self.held: list[tuple[int, ...]] = []

    def step_s(self) -> float:
        """Return the time of a step, that of the ghosts included."""
        return float(self._times_s(self.control.shares).max())

    def _step(self) -> list[Observation]:
        seen = super()._step()
        times_s = self._times_s(self.shares).tolist()
        self.took_s += max(times_s)
        self.held.append(self.shares)
        return [replace(o, busy_s=(times_s[o.worker],)) for o in seen]

    def _times_s(self, shares: tuple[int, ...]) -> np.ndarray:
        return self._times().at(np.maximum(np.array(shares), 1))


def hopeless(spec: str = IDLE, **options: int | None) -> Ghosts:
    """Return four workers, the last of which takes 0.81 s with its least share."""
    lag = options.pop("lag", 1) or 1
    return Ghosts([0.01] * 4, [0.001] * 3 + [0.1], spec, lag, **options)


def left_out(plant: Plant) -> list[int]:
    return [rank for rank, share in enumerate(plant.control.shares) if not share]


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_worker_that_holds_up_the_others_is_left_out(lag: int, steps: int) -> None:
    with_it, without = hopeless(NEVER, lag=lag), hopeless(lag=lag)

    with_it.run(80 // steps, steps)
    without.run(80 // steps, steps)

    assert with_it.step_s() == pytest.approx(0.81)
    assert without.step_s() == pytest.approx(0.11), "one sample of its own"
    assert left_out(without) == [3]
    assert sum(without.control.shares) == 256
    assert max(without.control.shares[:3]) - min(without.control.shares[:3]) <= 1
    assert "worker host/3 gets no samples" in without.reasons[-1]
    assert "worker host/3 gets no samples" in without.kept


def test_a_quantum_makes_a_least_share_as_well() -> None:
    plant = hopeless(min_share=1, quantum=32)

    plant.run(20, 4)

    assert left_out(plant) == [3]
    assert sum(plant.control.shares) == 256
    assert np.count_nonzero(np.array(plant.control.shares) % 32) <= 1


def test_no_worker_is_left_out_if_one_sample_is_the_smallest_share() -> None:
    plant = Ghosts([0.01] * 3 + [2.0], [0.001] * 4, min_share=1)

    plant.run(30, 4)

    assert plant.control.shares[3] >= 1, "a ghost takes as long"
    assert all(all(shares) for shares in plant.held)


def test_no_worker_is_left_out_that_the_others_cannot_replace() -> None:
    plant = hopeless(max_share=83)

    plant.run(30, 4)

    assert all(all(shares) for shares in plant.held)
    assert hopeless(max_share=86).run(30, 4)[3] == 0


def test_a_slow_but_useful_worker_is_not_left_out() -> None:
    plant = Ghosts([0.01] * 4, [0.001] * 3 + [0.008])

    plant.run(30, 4)

    assert all(all(shares) for shares in plant.held)


def test_equally_slow_workers_are_left_out_together() -> None:
    plant = Ghosts([0.01] * 5, [0.001] * 3 + [0.1] * 2)

    plant.run(40, 4)

    assert left_out(plant) == [3, 4]
    assert plant.step_s() == pytest.approx(0.11)


def test_only_workers_without_which_steps_are_faster_are_left_out() -> None:
    # With 8 samples 0.81 s and 0.09 s; without the last one, the others take about 0.1 s.
    plant = Ghosts([0.01] * 5, [0.001] * 3 + [0.01, 0.1])

    plant.run(40, 4)

    assert left_out(plant) == [4]


@pytest.mark.parametrize("lag", [1, 4])
def test_a_recovery_that_the_ghosts_show_is_noticed_at_once(lag: int) -> None:
    plant = hopeless(lag=lag)
    plant.run(30, 4)
    plant.per_sample_s[3] = 0.001

    plant.run(20 + 2 * lag, 4)

    assert plant.step_s() <= 1.02 * 0.074, "equal shares of equal workers"
    assert any("host/3 gets its smallest share" in reason for reason in plant.reasons)


def test_a_recovery_that_ghosts_do_not_show_is_noticed_by_trying() -> None:
    plant = Ghosts([0.01] * 3 + [0.3], [0.005] * 3 + [0.06])
    plant.run(30, 4)
    assert left_out(plant) == [3]
    (away,) = plant.control.policy_state.idle.away
    plant.per_sample_s[3] = 0.0005  # 0.36 s with a ghost before, 0.3005 s now

    plant.run(-(-away.again // 4) + 20, 4)

    assert plant.control.shares[3] > 8


def test_a_worker_that_stays_hopeless_is_tried_ever_more_seldom() -> None:
    plant = hopeless()
    plant.run(400, 25)

    trials = sum("gets its smallest share" in reason for reason in plant.reasons)
    assert 2 <= trials <= 1 + math.log2(10_000 / 64)
    assert left_out(plant) == [3]
    first = next(step for step, shares in enumerate(plant.held) if shares[3] == 0)
    later = plant.held[first:]
    extra_s = sum(0.81 - 0.11 for shares in later if shares[3])
    assert 0 < extra_s <= 0.05 * 0.11 * len(later)


def test_left_out_workers_return_when_the_others_get_slower() -> None:
    plant = hopeless()
    plant.run(30, 4)
    plant.per_sample_s[:3] = 0.1

    plant.run(20, 4)

    assert left_out(plant) == []
    assert plant.step_s() <= 1.03 * 6.41


def test_a_bound_that_shrinks_brings_a_worker_back() -> None:
    plant = hopeless()
    plant.run(30, 4)
    fleet, state = plant.control.fleet, plant.control.policy_state
    assert fleet is not None and plant.control.estimate is not None
    narrow = replace(fleet, workers=tuple(replace(w, max_share=83) for w in fleet.workers))
    reported = Measurements.of(())
    situation = Situation(narrow, plant.control.shares, 999, reported, plant.control.estimate)

    state, decision = Adaptive(allow_idle=1).decide(state, situation)

    assert isinstance(decision, Move)
    assert min(decision.shares) >= 8
    assert state is not None and not state.idle.away


GROUP = {"samples_per_s": 1000.0, "fixed_s": 0.01}


@pytest.mark.parametrize("noise", [0.02, 0.10, 0.3])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("spike_factor", [2.0, 40.0])
def test_noise_and_spikes_leave_no_equal_worker_out(
    noise: float, count: int, spike_factor: float
) -> None:
    """Each has at least 24 of its 32 samples, so leaving it out would save some time."""
    group: dict[str, object] = {**GROUP, "count": count, "min_share": 24, "noise": noise}
    group |= {"spike_rate": 0.005, "spike_factor": spike_factor}
    for every, steps in ((1, 200), ("leader", 1000)):
        for seed in range(2):
            made = _scenario(32 * count, [group], steps=steps, exchange={"every": every})
            track = Simulation(made, policy_from_spec(IDLE), seed).run()
            assert all(split.all() for split in track.splits)


def _scenario(batch: int, workers: list[dict[str, object]], **values: object) -> Scenario:
    plain = {"name": "made", "global_batch": batch, "workers": workers, **values}
    return Scenario.model_validate(plain)


SCENARIO = """\
name: one hopeless worker
global_batch: 256
steps: 2000
workers:
  - {name: fast, count: 3, samples_per_s: 1000, fixed_s: 0.01, min_share: 8, noise: 0.03}
  - {name: hopeless, samples_per_s: 20, fixed_s: 0.05, min_share: 8, noise: 0.03}
exchange: {every: leader}
events:
  - {kind: step, at: 1500, workers: 3, speed: 50}
"""


def test_a_simulated_cluster_is_faster_without_its_hopeless_worker(tmp_path: Path) -> None:
    file = tmp_path / "hopeless.yaml"
    file.write_text(SCENARIO)
    made = Scenario.model_validate(yaml.safe_load(file.read_text()))

    def run(spec: str) -> SimulatedSteps:
        return Simulation(made, policy_from_spec(spec), seed=1).run()

    with_it, without = run(NEVER), run(IDLE)

    assert np.mean(with_it.mean_s[500:1500]) == pytest.approx(0.45, rel=0.01)
    assert np.mean(without.mean_s[500:1500]) <= 1.05 * 0.10
    assert np.mean(without.mean_s[1900:]) <= 1.02 * np.mean(with_it.mean_s[1900:])
    assert without.splits[-1].min() > 50, "it took part again"


@given(data=st.data())
def test_it_keeps_the_contract_for_any_reports(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    policy = Adaptive(allow_idle=1)
    state, decision = policy.init(fleet)
    estimate, step, shares = Estimate.unknown(len(fleet)), 0, decision.shares
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            shares = data.draw(splits(fleet))
        step += data.draw(st.integers(1, 500))
        measured = Measurements.of(data.draw(observations(shares)))
        estimate = learn_times(estimate, measured)
        situation = Situation(fleet, shares, step, measured, estimate)
        before = pickle.dumps((state, situation))

        following = policy.decide(state, situation)

        assert pickle.dumps((state, situation)) == before
        # Both from copies, because pickles also show which objects are the same.
        once, again = (policy.decide(*pickle.loads(before)) for _ in range(2))
        assert pickle.dumps(again) == pickle.dumps(once)
        assert again[1] == following[1]
        state, made = following
        assert made.reason.strip() and "\n" not in made.reason and ". " not in made.reason
        if isinstance(made, Move):
            shares = made.shares
            assert sum(shares) == fleet.global_batch
            assert {type(share) for share in shares} == {int}
            at = np.array(shares)
            assert ((at == 0) | ((fleet.lower <= at) & (at <= fleet.upper))).all()


def test_a_least_share_is_whole() -> None:
    plant = hopeless(min_share=9, quantum=8)
    assert plant.control.fleet is not None
    assert as_shares(least_shares(plant.control.fleet)) == (16,) * 4


@pytest.mark.parametrize("value", ["2", "-1"])
def test_it_is_either_allowed_or_not(value: str) -> None:
    assert policy_from_spec(IDLE) == Adaptive(allow_idle=1)
    assert policy_from_spec(NEVER) == Adaptive(allow_idle=0)
    with raises_message(ConfigError, "allow_idle", value):
        policy_from_spec(f"adaptive:allow_idle={value}")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"allow_idle": True}, "allow_idle"),
        ({"opening_steps": 5.0}, "opening_steps is 5.0"),
    ],
)
def test_an_object_takes_what_a_text_can_say(settings: dict[str, Any], refused: str) -> None:
    # Ranks compare policies by their texts, and no text reads back as True or as 5.0 steps.
    with raises_message(ConfigError, refused):
        Adaptive(**settings)
