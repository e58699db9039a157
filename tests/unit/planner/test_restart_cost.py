"""What losses cost a run: against runs that are simulated loss by loss, and against the papers."""

from __future__ import annotations

from dataclasses import replace
from math import exp, expm1, inf, isfinite

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.reliability.checkpoint_interval import Saving, daly_s, next_save_in_s, young_s
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError
from evenstride.planner.spot_losses import (
    PreemptionRate,
    SaveCosts,
    expected_slowdown,
    from_band,
    lost_s,
    slowdown,
)
from evenstride.planner.spot_recordings import waits_s
from evenstride.sim.scenario.recordings import SpotTrace, machines
from tests.messages import raises_message

HOUR_S = 3600.0


def at_rate(per_h: float) -> PreemptionRate:
    """Return a rate that is known exactly."""
    return PreemptionRate(Exponential(HOUR_S / per_h), (per_h / HOUR_S,) * 20, "made up")


def simulated(
    hazard_per_s: float, useful_s: float, saves: SaveCosts, runs: int, seed: int
) -> npt.NDArray[np.float64]:
    """Return what some runs take in all, each loss drawn by itself."""
    rng = np.random.default_rng(seed)
    assert saves.every_s is not None
    stretch_s = saves.every_s + saves.save_s
    stretches = round(useful_s / saves.every_s)
    taken = np.zeros(runs)
    for run in range(runs):
        done = 0
        while done < stretches:
            until_s = rng.exponential(1.0 / hazard_per_s)
            whole = min(int(until_s / stretch_s), stretches - done)
            done += whole
            if done == stretches:
                taken[run] += whole * stretch_s
            else:
                taken[run] += until_s + rng.choice(saves.restart_s)
    return taken


CASES = {
    "rare": (0.02, SaveCosts(30.0, (300.0,), every_s=1200.0), 12 * HOUR_S),
    "some": (0.5, SaveCosts(30.0, (120.0, 1800.0), every_s=600.0), 12 * HOUR_S),
    "many": (3.0, SaveCosts(20.0, (60.0,), every_s=400.0), 24 * HOUR_S),
    "hopeless": (20.0, SaveCosts(20.0, (60.0,), every_s=400.0), HOUR_S),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_and_the_interval_are_those_of_simulated_runs(name: str) -> None:
    per_h, saves, useful_s = CASES[name]
    taken = simulated(per_h / HOUR_S, useful_s, saves, 4000, seed=7) / useful_s

    found = slowdown(at_rate(per_h), 1, useful_s, saves)

    assert found.value == pytest.approx(taken.mean(), rel=0.01)
    assert found.low == pytest.approx(np.quantile(taken, 0.05), rel=0.01)
    assert found.high == pytest.approx(np.quantile(taken, 0.95), rel=0.015)
    within = np.mean((taken >= found.low * (1 - 1e-9)) & (taken <= found.high))
    assert within >= 0.885


def test_machines_add_their_hazards() -> None:
    saves = SaveCosts(30.0, (300.0,), every_s=600.0)

    assert slowdown(at_rate(0.1), 8, HOUR_S, saves) == slowdown(at_rate(0.8), 1, HOUR_S, saves)


def test_without_a_loss_only_saves_take_time() -> None:
    never = PreemptionRate(Exponential(1e12), (0.0,) * 20, "made up")
    saves = SaveCosts(60.0, (300.0,), every_s=540.0)

    found = slowdown(never, 4, 10 * HOUR_S, saves)

    assert (found.value, found.low) == pytest.approx((600.0 / 540.0,) * 2)
    assert found.high == pytest.approx(found.low)


def test_a_rate_that_is_not_known_widens_the_interval() -> None:
    saves = SaveCosts(30.0, (300.0,), every_s=600.0)
    rates = tuple(np.geomspace(0.1, 2.0, 20) / HOUR_S)
    unsure = PreemptionRate(Exponential(HOUR_S / 0.447), rates, "made up")

    wide = slowdown(unsure, 1, 100 * HOUR_S, saves)
    sure = slowdown(at_rate(0.447), 1, 100 * HOUR_S, saves)

    assert wide.low < sure.low < sure.high < wide.high
    assert wide.value == pytest.approx(np.mean([expected_slowdown(saves, rate) for rate in rates]))


def test_restarts_that_are_not_as_they_were_widen_the_interval() -> None:
    as_they_were = SaveCosts(30.0, (600.0, 3000.0), every_s=600.0)
    not_sure = SaveCosts(30.0, (600.0, 3000.0), every_s=600.0, drift=0.6)

    sure, wide = (slowdown(at_rate(0.5), 1, 100 * HOUR_S, one) for one in (as_they_were, not_sure))

    assert wide.low < sure.low < sure.high < wide.high
    assert sure.value < wide.value < sure.high
    restarts = [one.mean_restart_s for one in not_sure.drifted()]
    assert restarts == sorted(restarts)
    assert restarts[2] == pytest.approx(1800.0)
    assert as_they_were.drifted() == [as_they_were]


def test_longer_runs_are_surer_of_their_mean() -> None:
    saves = SaveCosts(30.0, (300.0,), every_s=600.0)

    short, long = (slowdown(at_rate(0.5), 1, hours * HOUR_S, saves) for hours in (4.0, 400.0))

    assert long.value == short.value
    assert long.high - long.low < 0.2 * (short.high - short.low)


def test_a_higher_level_is_wider() -> None:
    saves = SaveCosts(30.0, (300.0,), every_s=600.0)

    half, most = (slowdown(at_rate(0.5), 1, 12 * HOUR_S, saves, level) for level in (0.5, 0.95))

    assert most.low < half.low < half.high < most.high


def test_what_never_ends_is_infinite() -> None:
    saves = SaveCosts(30.0, (300.0,), every_s=6000.0)

    found = slowdown(at_rate(600.0), 1, HOUR_S, saves)
    assert (found.value, found.low, found.high) == (inf, inf, inf)

    half = PreemptionRate(Exponential(HOUR_S), (0.01 / HOUR_S,) * 10 + (1.0,) * 10, "made up")
    mixed = slowdown(half, 1, HOUR_S, saves)
    assert isfinite(mixed.low)
    assert mixed.value == mixed.high == inf


@given(
    per_h=st.floats(1e-6, 50.0),
    every_s=st.floats(10.0, 7200.0),
    save_s=st.floats(0.1, 300.0),
    restart_s=st.floats(0.0, 7200.0),
    useful_s=st.floats(60.0, 1e6),
)
def test_the_interval_is_ordered_and_no_run_is_quicker_than_one_without_losses(
    per_h: float, every_s: float, save_s: float, restart_s: float, useful_s: float
) -> None:
    found = slowdown(at_rate(per_h), 1, useful_s, SaveCosts(save_s, (restart_s,), every_s))

    least = (every_s + save_s) / every_s
    assert least * (1 - 1e-9) <= found.low <= found.high
    assert found.value >= least * (1 - 1e-9)


def test_the_mean_is_dalys_for_restarts_that_are_short() -> None:
    saves, hazard_per_s = SaveCosts(30.0, (20.0,), every_s=900.0), 1.0 / HOUR_S

    daly = exp(20.0 * hazard_per_s) * expm1(930.0 * hazard_per_s) / (hazard_per_s * 900.0)

    assert expected_slowdown(saves, hazard_per_s) == pytest.approx(daly, rel=1e-4)


def test_the_mean_is_least_about_where_young_and_daly_say() -> None:
    hazard_per_s = 1.0 / (4.0 * HOUR_S)

    def taken(every_s: float) -> float:
        return expected_slowdown(SaveCosts(60.0, (0.0,), every_s), hazard_per_s)

    young, daly = young_s(60.0, 4.0 * HOUR_S), daly_s(60.0, 4.0 * HOUR_S)
    best = min(taken(every) for every in np.linspace(300.0, 3000.0, 500))
    assert taken(daly) == pytest.approx(best, rel=1e-5)
    assert taken(young) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("per_h", [0.01, 0.5, 5.0, 50.0])
def test_left_alone_a_run_saves_as_it_will_decide_itself(per_h: float) -> None:
    saves, hazard_per_s = SaveCosts(20.0, (60.0,)), per_h / HOUR_S

    decided = next_save_in_s(
        20.0, np.zeros(1), saving=Saving(lifetime=Exponential(1.0 / hazard_per_s))
    )

    assert saves.interval_s(hazard_per_s) == decided.in_s
    assert SaveCosts(20.0, (60.0,)).interval_s(0.0) == 3600.0
    assert SaveCosts(600.0, (60.0,)).interval_s(0.0) == 6000.0


def test_a_loss_costs_half_a_stretch_if_rare_and_a_mean_life_if_not() -> None:
    saves = SaveCosts(60.0, (0.0,), every_s=540.0)

    assert lost_s(saves, 0.0) == 300.0
    assert lost_s(saves, 1e-8) == pytest.approx(300.0, rel=1e-5)
    assert lost_s(saves, 1.0) == pytest.approx(1.0)
    assert lost_s(saves, 10.0) == pytest.approx(0.1)


@pytest.mark.parametrize("hazard_per_s", [1e-7, 1.6e-7, 1e-5, 1e-3, 1e-2])
def test_a_loss_costs_the_mean_age_of_the_last_save(hazard_per_s: float) -> None:
    saves = SaveCosts(60.0, (0.0,), every_s=540.0)

    age_s = (np.arange(100_000) + 0.5) * 600.0 / 100_000
    weight = np.exp(-hazard_per_s * age_s)

    assert lost_s(saves, hazard_per_s) == pytest.approx(np.average(age_s, weights=weight), rel=1e-6)


def test_a_better_band_costs_less() -> None:
    saves = SaveCosts(10.0, (180.0,))

    bands = [(0.0, 0.05), (0.05, 0.1), (0.1, 0.15), (0.15, 0.2), (0.2, 1.0)]
    taken = [slowdown(from_band(*band), 8, 24 * HOUR_S, saves) for band in bands]

    assert [one.value for one in taken] == sorted({one.value for one in taken})
    assert all(one.low < one.value for one in taken)
    assert taken[-1].value < taken[-1].high


def test_waits_are_until_enough_are_up_again() -> None:
    up = np.array([0, 2, 2, 1, 1, 2, 3, 2, 0, 1, 2, 1])
    recorded = machines([SpotTrace("made/up", 100.0, up)])

    # Lost at ticks 3 (back at 5), 7 (enough are left), 8 (back at 10) and 11 (cut off).
    assert waits_s(recorded, 2) == (200.0, 0.0, 200.0, 100.0)
    assert waits_s(recorded, 1) == (0.0, 0.0, 100.0, 0.0)
    assert waits_s(recorded, 4) == ()


@pytest.mark.parametrize(
    ("save_s", "restart_s", "every_s"),
    [
        (0.0, (1.0,), 60.0),
        (10.0, (), 60.0),
        (10.0, (-1.0,), 60.0),
        (10.0, (inf,), None),
        (1.0, (1.0,), 0.0),
    ],
    ids=str,
)
def test_what_are_no_times_is_refused(
    save_s: float, restart_s: tuple[float, ...], every_s: float | None
) -> None:
    with raises_message(ConfigError):
        SaveCosts(save_s, restart_s, every_s)


@pytest.mark.parametrize(
    ("count", "useful_s", "level"), [(0, 60.0, 0.9), (1, 0.0, 0.9), (1, 60.0, 1.0)]
)
def test_an_invalid_run_is_refused(count: int, useful_s: float, level: float) -> None:
    with raises_message(ConfigError):
        slowdown(at_rate(1.0), count, useful_s, SaveCosts(1.0, (1.0,)), level)


def test_frequent_losses_that_come_with_long_waits_cost_more() -> None:
    """The mean of a product grows with the correlation of what is multiplied."""
    saves = SaveCosts(10.0, (600.0,), drift=0.7, together=0.0)
    kind = from_band(0.2, 1.0)
    alone, leaning = (
        slowdown(kind, 4, 36e3, replace(saves, together=together)) for together in (0.0, 0.9)
    )

    assert leaning.value > alone.value + 0.05 * (alone.value - 1.0)
    assert leaning.high > alone.high
    with raises_message(ConfigError):
        replace(saves, together=1.1)


@pytest.mark.parametrize("together", [0.0, 0.6, -0.6])
def test_what_goes_with_the_rate_is_no_drift_of_restarts_alone(together: float) -> None:
    """Rate and waits together vary by the drift, as the waits alone do without correlation."""
    saves = SaveCosts(10.0, (600.0,), drift=0.7, together=together)

    def logs(rate_at: float) -> npt.NDArray[np.float64]:
        return np.log([one.mean_restart_s for one in saves.drifted(rate_at)])

    alone = np.log([one.mean_restart_s for one in replace(saves, together=0.0).drifted()])
    assert np.ptp(logs(0.5)) == pytest.approx(np.ptp(alone) * (1.0 - together**2) ** 0.5)
    one_sigma = float(logs(0.841344746).mean() - logs(0.5).mean())
    assert one_sigma == pytest.approx(0.7 * together, abs=1e-6)
