"""Slow first steps at new shares are not learned from, and no worker stays stuck for good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.control.advance import advance
from evenstride.core.control.events import ExchangeAfter, Exchanged, FleetFormed, SetShares
from evenstride.core.control.state import Control
from evenstride.core.fleet import FloatArray, Worker, as_array
from evenstride.core.policies.adaptive import Adaptive
from evenstride.core.time_model.estimates import Estimate, TimeModel
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.sim.scoring.suite import ScoredScenario
from tests.effort import expensive
from tests.unit.sim.clusters import scenario


def _seen(share: int, *busy_s: float, step: int = 1) -> Measurements:
    return Measurements.of((Observation(0, share, step, busy_s, (0.0,) * len(busy_s)),))


def _learned(*seen: Measurements) -> Estimate:
    estimate = Estimate.unknown(1)
    for each in seen:
        estimate = learn_times(estimate, each)
    return estimate


def _at(estimate: Estimate, share: int) -> float:
    return float(estimate.model.at(np.array([share]))[0])


CALM = (_seen(50, *[0.2] * 8),) * 6


def test_a_slow_first_step_at_a_new_share_changes_nothing() -> None:
    calm = _learned(*CALM)
    # Two slow steps in a row at shares that it has had would be believed.
    after = learn_times(
        learn_times(learn_times(calm, _seen(51, 0.7)), _seen(52, 0.7)), _seen(53, 0.7)
    )

    assert _at(after, 50) == pytest.approx(_at(calm, 50), rel=1e-3)


def test_a_slow_down_at_a_new_share_shows_in_the_second_step() -> None:
    after = _learned(*CALM, _seen(51, 0.7), _seen(51, 0.7))

    assert _at(after, 51) == pytest.approx(0.7, rel=0.1)


def test_a_slow_down_that_began_before_the_new_share_is_not_put_off() -> None:
    after = _learned(*CALM, _seen(50, 0.7), _seen(51, 0.7))

    assert _at(after, 51) == pytest.approx(0.7, rel=0.1)


def test_a_worker_whose_share_changes_with_every_step_is_learned_from() -> None:
    slow = [_seen(share, 0.7) for share in (51, 49, 52, 48, 53, 47)]

    assert _at(_learned(*CALM, *slow), 50) == pytest.approx(0.7, rel=0.15)


def test_a_slow_step_at_a_share_that_the_worker_has_had_counts() -> None:
    after = _learned(*CALM, _seen(51, 0.2), _seen(50, 0.7), _seen(51, 0.7))

    assert _at(after, 51) == pytest.approx(0.7, rel=0.1)


CHEAP = (*CALM, _seen(51, 0.2), _seen(52, 0.2))


def test_slow_first_steps_count_where_new_shares_cost_nothing() -> None:
    after = _learned(*CHEAP, _seen(53, 0.7), _seen(54, 0.7))

    assert _at(after, 54) == pytest.approx(0.7, rel=0.1)


def test_one_costly_first_step_is_enough_to_wait_for_second_steps_again() -> None:
    cheap = _learned(*CHEAP)

    after = _learned(*CHEAP, _seen(53, 0.7), _seen(53, 0.2), _seen(54, 0.7), _seen(55, 0.7))

    assert _at(after, 50) == pytest.approx(_at(cheap, 50), rel=0.02)


def test_of_several_steps_at_a_new_share_a_slow_first_one_does_not_count() -> None:
    calm = _learned(*CALM)

    after = learn_times(calm, _seen(51, 1.2, 0.2))

    assert _at(after, 51) == pytest.approx(_at(calm, 51), rel=0.02)


def _team(*times_s: float, share: int) -> Measurements:
    return Measurements.of(
        tuple(Observation(rank, share, 1, (t,), (0.0,)) for rank, t in enumerate(times_s))
    )


def _after(*steps: Measurements, workers: int) -> Estimate:
    estimate = Estimate.unknown(workers)
    for each in steps:
        estimate = learn_times(estimate, each)
    return estimate


# Each step has new shares, and takes 0.4 s more for that reason alone.
def _first_s(share: int) -> float:
    return 0.4 + 0.004 * share


ALL_NEW = tuple(_team(*[_first_s(share)] * 3, share=share) for share in (100, 51, 52, 53))


def test_if_all_workers_are_faster_in_a_second_step_then_new_shares_cost_time() -> None:
    estimate = _after(*ALL_NEW, _team(*[_first_s(53) - 0.4] * 3, share=53), workers=3)

    assert estimate.firsts.split_s(np.full(3, 54)) == pytest.approx(0.4)
    assert (estimate.model.at(np.full(3, 100)) < 0.4).all(), "no share takes as long as before"
    slow = learn_times(estimate, _team(*[_first_s(54)] * 3, share=54))
    assert slow.model.at(np.full(3, 54)) == pytest.approx(_first_s(54) - 0.4, rel=0.1)


@pytest.mark.parametrize("second_s", [(0.2, 0.6, 0.6), (0.55, 0.55, 0.55)])
def test_one_faster_worker_and_small_differences_are_no_cost_of_new_shares(
    second_s: tuple[float, ...],
) -> None:
    estimate = _after(*ALL_NEW, _team(*second_s, share=53), workers=3)

    assert estimate.firsts.split_s(np.full(3, 54)) == 0


@pytest.mark.parametrize(("workers", "noisy", "cost_s"), [(3, 2, 0.0), (5, 4, 0.05)])
def test_noise_of_a_few_workers_is_no_cost_of_new_shares(
    workers: int, noisy: int, cost_s: float
) -> None:
    def step(share: int, time_s: float) -> Measurements:
        return _team(*[time_s] * noisy, *[0.2] * (workers - noisy), share=share)

    calm = [step(share, time_s) for share in (50, 51, 52, 53) for time_s in (0.18, 0.23) * 4]
    first, second = step(54, 0.23), step(54, 0.18)

    estimate = _after(*calm, first, second, workers=workers)

    assert estimate.firsts.split_s(np.full(workers, 55)) == pytest.approx(cost_s)


def test_the_first_step_of_a_run_is_no_cost_of_new_shares() -> None:
    first, second = _team(0.6, 0.6, 0.6, share=50), _team(0.2, 0.2, 0.2, share=50)

    estimate = _after(first, second, workers=3)

    assert estimate.firsts.split_s(np.full(3, 54)) == 0


# Measured with 0.15, 0.85 and 1 core, in ms. The first 15 samples of worker 0 took 82 ms, later 51.
MEASURED = (
    ((104, 104, 104), (326, 90, 47)),
    ((9, 86, 217), (80, 110, 122)),
    ((8, 87, 217), (61, 90, 100)),
    ((15, 93, 204), (82, 109, 101)),
    ((15, 93, 204), (51, 96, 100)),
)


def _measured(shares: tuple[int, ...], times_ms: tuple[int, ...]) -> Measurements:
    return Measurements.of(
        tuple(
            Observation(rank, share, 1, (ms / 1e3,), (0.0,))
            for rank, (share, ms) in enumerate(zip(shares, times_ms, strict=True))
        )
    )


def test_a_long_first_step_does_not_scale_the_whole_curve() -> None:
    estimate = _after(*(_measured(*step) for step in MEASURED), workers=3)

    assert float(estimate.model.at(np.full(3, 104))[0]) == pytest.approx(0.326, rel=0.2)


@pytest.mark.parametrize(
    ("steps", "fast_s"),
    [
        pytest.param(
            [(50, 0.1), (60, 0.12)] * 4 + [(200, 0.32)], 0.16, id="some were second steps"
        ),
        pytest.param([(50, 0.1), (60, 0.12), (80, 0.15)], 0.075, id="more samples take less time"),
    ],
)
def test_other_falls_are_changes_of_speed(steps: list[tuple[int, float]], fast_s: float) -> None:
    before = [_team(time_s, 0.1, 0.1, share=share) for share, time_s in steps]
    share, first_s = steps[-1]

    estimate = _after(*before, _team(fast_s, 0.1, 0.1, share=share), workers=3)

    at_50_s = float(estimate.model.at(np.full(3, 50))[0])
    assert at_50_s == pytest.approx(0.1 * fast_s / first_s, rel=0.1)


def test_waves_do_not_hide_a_long_first_step() -> None:
    estimate = Estimate.unknown(3)
    found = replace(estimate.seen, quantum=np.array([4, 1, 1]))
    estimate = replace(estimate, seen=found)
    for shares, times_ms in MEASURED:
        estimate = learn_times(estimate, _measured(shares, times_ms))
        estimate = replace(estimate, seen=replace(estimate.seen, quantum=found.quantum))

    assert float(estimate.model.at(np.full(3, 104))[0]) == pytest.approx(0.326, rel=0.2)


def test_the_second_of_two_steps_in_one_observation_is_no_first_step() -> None:
    calm = [_team(*[0.2] * 5, share=share) for share in (50, 51, 52) for _ in range(4)]
    both = tuple(Observation(rank, 54, 1, (0.6, 0.2), (0.0, 0.0)) for rank in range(5))

    estimate = _after(*calm, Measurements.of(both), _team(*[0.1] * 5, share=54), workers=5)

    assert estimate.firsts.split_s(np.full(5, 55)) == pytest.approx(0.4), "of the first step only"


def _storm(
    extra_s: float, seed: int, workers: list[dict[str, Any]], lag: int = 3
) -> tuple[float, float, int]:
    """Return the efficiency, the real time against equal batches, and the moves."""
    made = scenario(
        global_batch=512,
        steps=150,
        workers=[{**kind, "new_share_s": extra_s} for kind in workers],
        exchange={"lag": lag},
        events=[{"kind": "step", "at": 50, "workers": 0, "speed": 0.5}],
    )
    stage = ScoredScenario.of(made, seed)
    row, track = stage.run("adaptive")
    equal = stage.run("uniform")[1]
    ahead = float(equal.real_s.sum() / track.real_s.sum())
    return row.efficiency_mean, ahead, len(track.decisions)


EQUAL: list[dict[str, Any]] = [
    {"count": 8, "samples_per_s": 2000.0, "fixed_s": 0.02, "noise": 0.05}
]
UNEQUAL: list[dict[str, Any]] = [
    {"count": 4, "name": "fast", "samples_per_s": 3000.0, "fixed_s": 0.02, "noise": 0.02},
    {"count": 4, "name": "slow", "samples_per_s": 150.0, "fixed_s": 0.02, "noise": 0.02},
]


@pytest.mark.parametrize("extra_s", [0.2, 0.5])
def test_slow_first_steps_start_no_storm_of_moves(extra_s: float) -> None:
    without, _, _ = _storm(0.0, 1, EQUAL)
    efficiency, ahead, moves = _storm(extra_s, 1, EQUAL)

    # A second move would gain less than its first step costs.
    assert efficiency > without - 0.02
    assert ahead > 1.15
    assert moves < 12


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_first_step_is_no_wave_and_no_cliff(seed: int) -> None:
    noisy = [{**EQUAL[0], "samples_per_s": 1000.0, "fixed_s": 0.01, "noise": 0.03}]

    efficiency, ahead, _ = _storm(0.05, seed, noisy, lag=1)

    assert efficiency > 0.93, "the slow-down of a worker is balanced"
    assert ahead > 1.2


def test_slow_first_steps_start_no_storm_among_very_unequal_workers() -> None:
    without, _, _ = _storm(0.0, 0, UNEQUAL)
    efficiency, _, moves = _storm(0.5, 0, UNEQUAL)

    assert efficiency > without - 0.03
    assert moves < 20


# Workers of three kinds differ sixfold, so several splits in a row give everyone a new share.
MIXED = [
    {"count": 4, "name": "slow", "samples_per_s": 85.0, "fixed_s": 0.025, "noise": 0.1},
    {"count": 3, "name": "usual", "samples_per_s": 450.0, "fixed_s": 0.025, "noise": 0.1},
    {"count": 8, "name": "noisy", "samples_per_s": 515.0, "fixed_s": 0.0126, "noise": 0.2},
    {"name": "other", "samples_per_s": 388.0, "fixed_s": 0.05, "noise": 0.1},
]
SPIKES = [{"spike_factor": 2.0}, {"spike_factor": 2.0}, {"spike_factor": 6.0}, {}]


@pytest.mark.parametrize("seed", [2, 31])
def test_shares_that_changed_with_every_step_stay_once_to_show_what_that_costs(seed: int) -> None:
    workers = [
        {**kind, **spikes, "spike_rate": 0.02, "new_share_s": 2.1}
        for kind, spikes in zip(MIXED, SPIKES, strict=True)
    ]
    made = scenario(global_batch=1024, steps=200, workers=workers, exchange={"every": 1, "lag": 1})

    track = ScoredScenario.of(made, seed).run("adaptive")[1]

    # With a new split each, all steps would take over 2.1 s.
    assert np.median(track.real_s[60:]) < 0.6


@dataclass
class Fleet:
    """Workers with affine times, whose first steps, spikes and flags a test sets.

    Args:
        fixed_s: per worker.
        per_sample_s: per worker.
        batch: samples per step.
        odd: what step and worker take as a multiple of the usual time.
        flagged: whether a step and worker is not modelled.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    batch: int
    odd: Callable[[int, int], float]
    flagged: Callable[[int, int], bool]

    def efficiency(self, steps: int) -> float:
        """Return the shortest step over that of the split in force after some steps."""
        count = len(self.fixed_s)
        fleet = tuple(Worker(str(rank)) for rank in range(count))
        control, (opening, *_, after) = advance(
            Control(Adaptive()), FleetFormed(0, 0, self.batch, fleet)
        )
        assert isinstance(opening, SetShares)
        shares, begun = as_array(opening.shares), 0
        while begun < steps:
            assert isinstance(after, ExchangeAfter)
            stop = begun + after.steps
            seen = [
                self._seen(step, rank, int(shares[rank]))
                for rank in range(count)
                for step in range(begun, stop)
            ]
            control, (verdict, *_, after) = advance(
                control, Exchanged(stop, stop, Measurements.of(seen))
            )
            if isinstance(verdict, SetShares):
                shares = as_array(verdict.shares)
            begun = stop
        model = TimeModel.affine(self.fixed_s, self.per_sample_s)
        ones = np.ones(count, dtype=np.int64)
        best = equal_finish(model, ones, self.batch * ones, self.batch)
        return float(model.at(best).max() / model.at(np.maximum(shares, 1)).max())

    def _seen(self, step: int, rank: int, share: int) -> Observation:
        usual_s = self.fixed_s[rank] + self.per_sample_s[rank] * share
        time_s = float(usual_s * self.odd(step, rank))
        flagged = self.flagged(step, rank)
        return Observation(rank, share, step, (time_s,), (0.0,), modelled=not flagged)


def _stuck(seed: int, factor: float, chance: float, spikes: float) -> float:
    """Return the efficiency that a fleet with odd first steps comes to."""
    dice = np.random.default_rng(seed)
    count = int(dice.integers(2, 9))
    odd = np.exp(0.02 * dice.standard_normal((600, count)))
    slow = dice.random(count) < chance
    odd[1, slow] *= factor
    odd[2:300] *= np.where(dice.random((298, count)) < spikes, 3.0, 1.0)
    flags = dice.random((20, count)) < 0.3
    flags[0] = True

    fleet = Fleet(
        fixed_s=dice.uniform(0.005, 0.05, count),
        per_sample_s=10 ** dice.uniform(-3.3, -2.0, count),
        batch=32 * count,
        odd=lambda step, rank: float(odd[step % 600, rank]),
        flagged=lambda step, rank: step < 20 and bool(flags[step, rank]),
    )
    return fleet.efficiency(500)


# Fixed cases, as about one in sixty stays a little under the goal: see the next test.
@pytest.mark.parametrize("case", range(30))
def test_no_worker_is_stuck_for_good_whatever_its_first_steps_were(case: int) -> None:
    dice = np.random.default_rng(case)
    factor, chance, spikes = dice.uniform((2.0, 0.1, 0.0), (50.0, 1.0, 0.02))

    assert _stuck(case, factor, chance, spikes) >= 0.95


def test_a_fleet_whose_first_steps_all_take_seven_times_as_long_is_balanced() -> None:
    assert _stuck(seed=313, factor=7.0, chance=1.0, spikes=0.0) >= 0.95


def test_a_safe_trial_frees_a_split_that_doubt_would_keep_for_good() -> None:
    dice, count = np.random.default_rng(14), 8
    odd = np.exp(0.02 * dice.standard_normal((600, count)))
    slow = dice.random(count) < 0.6
    odd[1, slow] *= dice.uniform(10, 40)

    fleet = Fleet(
        fixed_s=dice.uniform(0.005, 0.05, count),
        per_sample_s=10 ** dice.uniform(-3.3, -2.0, count),
        batch=32 * count,
        odd=lambda step, rank: float(odd[step % 600, rank]),
        flagged=lambda step, _: step == 0,
    )

    # Without the trial it stays at 0.74.
    assert fleet.efficiency(200) >= 0.95


@expensive
@given(seed=st.integers(0, 10**6), factor=st.floats(2, 50), chance=st.floats(0.1, 1))
def test_no_first_steps_spikes_or_flags_end_the_measurement_of_a_worker(
    seed: int, factor: float, chance: float
) -> None:
    # A goal that noise cannot miss: a worker that is never measured again costs far more.
    assert _stuck(seed, factor, chance, spikes=0.01) >= 0.80
