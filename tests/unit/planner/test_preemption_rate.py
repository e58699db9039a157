"""How soon spot machines are taken away: bands, offers and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import gamma

from evenstride.core.reliability.lifetimes import DAY_S, Exponential, TwoRates
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Offer
from evenstride.planner.spot_losses import (
    MONTH_S,
    SHORTEST_MEAN_S,
    PreemptionRate,
    drift_factors,
    from_band,
    from_offer,
)
from evenstride.planner.spot_recordings import from_recorded
from evenstride.sim.scenario.recordings import (
    Machines,
    SpotTrace,
    load_spot_traces,
    machines,
    spot_traces,
)
from tests.messages import check_message, raises_message

BANDS = [(0.0, 0.05), (0.05, 0.1), (0.1, 0.15), (0.15, 0.2), (0.2, 1.0)]


@pytest.mark.parametrize("band", BANDS[:4], ids=str)
def test_each_rate_of_a_band_takes_a_part_within_it(band: tuple[float, float]) -> None:
    rates = from_band(*band).rates_per_s

    parts = [1.0 - exp(-rate * MONTH_S) for rate in rates]
    low, high = band
    assert len(parts) == 20
    assert parts == sorted(parts)
    assert np.allclose(np.diff(parts), (high - low) / 20)
    assert low < parts[0] < parts[-1] < high


def test_the_open_band_goes_from_its_low_end_to_the_shortest_life_evenly_in_the_logarithm() -> None:
    found = from_band(0.2, 1.0)

    rates = np.array(found.rates_per_s)
    assert 1.0 - exp(-rates[0] * MONTH_S) > 0.2
    assert rates[-1] < 1.0 / SHORTEST_MEAN_S < 1.5 * rates[-1]
    assert np.allclose(np.diff(np.log(rates)), np.log(rates[1] / rates[0]))
    check_message(found.reason)


def test_worse_bands_have_higher_rates() -> None:
    found = [from_band(*band).losses_per_h for band in BANDS]

    for better, worse in pairwise(found):
        assert better.value < worse.value
        assert better.high <= worse.low


def test_the_figure_of_a_band_lies_within_its_interval_and_is_that_of_its_model() -> None:
    for band in BANDS:
        found = from_band(*band)

        rate = found.losses_per_h
        assert rate.low < rate.value < rate.high
        assert isinstance(found.lifetime, Exponential)
        assert rate.value == pytest.approx(3600.0 / found.lifetime.mean_s)


def test_a_band_of_one_part_is_exact() -> None:
    found = from_band(0.1, 0.1)

    assert set(found.rates_per_s) == {found.rates_per_s[0]}
    assert found.losses_per_h.low == pytest.approx(found.losses_per_h.high)


@pytest.mark.parametrize("band", [(0.2, 0.1), (-0.1, 0.1), (0.1, 20.0), (1.0, 1.0)], ids=str)
def test_an_invalid_band_is_refused(band: tuple[float, float]) -> None:
    with raises_message(ConfigError):
        from_band(*band)


def test_an_offer_without_a_band_may_be_anything() -> None:
    reported = from_offer(Offer(instance_type="x", usd_per_h=1.0, interruption=(0.0, 0.05)))
    silent = from_offer(Offer(instance_type="g2-standard-4", usd_per_h=1.0))

    assert reported == from_band(0.0, 0.05)
    assert silent.losses_per_h.low < reported.losses_per_h.high
    assert silent.losses_per_h.high > from_band(0.15, 0.2).losses_per_h.high
    check_message(silent.reason)


def _recorded(lives: Sequence[int], gap_s: float = 600.0) -> Machines:
    """Return a machine after another in one slot, each up for some ticks and then away for one."""
    up = [0]
    for life in lives:
        up += [1] * life + [0]
    return machines([SpotTrace("made/up", gap_s, np.array(up, dtype=np.int64))])


def _even(total: int, seed: int) -> list[int]:
    """Return lives of a constant rate, some thirty ticks each."""
    drawn = np.random.default_rng(seed).exponential(30.0, total)
    return [int(life) + 1 for life in drawn]


def test_the_rate_of_a_recording_is_found() -> None:
    found = from_recorded(_recorded(_even(2000, seed=1)), drift=0.0)

    true_per_h = 1.0 / (30.5 * 600.0 / 3600.0)
    assert isinstance(found.lifetime, Exponential)
    assert found.losses_per_h.value == pytest.approx(true_per_h, rel=0.05)
    assert found.losses_per_h.low < 0.8 * true_per_h < 1.2 * true_per_h < found.losses_per_h.high
    assert np.mean(found.rates_per_s) * 3600.0 == pytest.approx(true_per_h, rel=0.05)
    assert "rates from" in found.reason


def test_losses_that_come_together_make_the_rate_less_sure() -> None:
    lives = _even(2000, seed=2)
    even = from_recorded(_recorded(lives), drift=0.0).losses_per_h
    sorted_lives = from_recorded(_recorded(sorted(lives)), drift=0.0).losses_per_h

    assert sorted_lives.value == pytest.approx(even.value, rel=0.02)
    assert sorted_lives.high > 2.0 * even.high


def test_longer_windows_are_more_certain_and_at_most_a_tenth() -> None:
    recorded = _recorded(_even(2000, seed=3))

    def width(found: PreemptionRate) -> float:
        return found.rates_per_s[-1] - found.rates_per_s[0]

    day, week = (from_recorded(recorded, days * DAY_S, drift=0.0) for days in (1.0, 7.0))

    assert width(week) < 0.6 * width(day)
    assert from_recorded(recorded, 1e9).reason.endswith(
        ("10 windows of the recording", "11 windows of the recording")
    )


def test_days_to_come_may_differ_from_those_that_were_recorded() -> None:
    recorded = _recorded(_even(2000, seed=4))

    same = from_recorded(recorded, 14.0 * DAY_S, drift=0.0)
    other = from_recorded(recorded, 14.0 * DAY_S, drift=0.5)

    assert same.lifetime == other.lifetime
    assert np.median(other.rates_per_s) == pytest.approx(np.median(same.rates_per_s), rel=0.03)
    for n, z in ((0, -1.96), (-1, 1.96)):
        apart = np.log(other.rates_per_s[n] / np.median(same.rates_per_s))
        assert apart == pytest.approx(0.5 * z, rel=0.15)
    assert np.std(np.log(drift_factors(0.5, 1000))) == pytest.approx(0.5, rel=0.01)


def test_windows_count_by_the_time_of_their_machines() -> None:
    # Nine windows of machines that last, and two in which some go that were hardly there.
    up = np.array([0] + [5] * 90 + [0] * 9 + [5, 0])
    recorded = machines([SpotTrace("made/up", 600.0, up)])

    found = from_recorded(recorded, 6000.0)

    assert found.rates_per_s == (0.0,) * 20
    assert found.losses_per_h.high == found.losses_per_h.value > 0.0


@pytest.mark.parametrize("losses", [1, 2, 4])
def test_few_losses_follow_the_poisson_distribution(losses: int) -> None:
    """Windows with one would weigh too little to be seen; the rate is as likely as Poisson has it.

    So 95 % of what is likely after one loss lies between a fifth and four times its rate or so.
    """
    recorded = machines([SpotTrace("made/up", 600.0, np.array([9] * 199 + [9 - losses]))])

    found = from_recorded(recorded, drift=0.0)

    rate = losses / (199 * 9 * 600.0)
    assert np.mean(found.rates_per_s) == pytest.approx((losses + 0.5) / losses * rate, rel=0.05)
    low, high = gamma.ppf([0.025, 0.975], losses + 0.5) / losses
    assert (found.rates_per_s[0] / rate, found.rates_per_s[-1] / rate) == pytest.approx(
        (low, high), rel=0.25
    )


def test_a_recording_without_a_loss_tells_no_rate() -> None:
    recorded = machines([SpotTrace("made/up", 60.0, np.array([0, 1, 1, 1]))])

    with raises_message(ConfigError):
        from_recorded(recorded)


@pytest.mark.data
def test_recorded_machines_of_the_open_band_live_as_long_as_it_says(data_root: Path) -> None:
    if not (data_root / "traces" / "spot-traces.json.gz").is_file():
        pytest.skip("no spot traces")
    load_spot_traces.cache_clear()

    open_band = from_band(0.2, 1.0).losses_per_h
    for name in ("preemption/1-node/aws-04-22-2023", "preemption/4-node/aws-08-03-2023/us-west-2c"):
        found = from_recorded(machines([t for t in load_spot_traces() if t.name.startswith(name)]))

        assert isinstance(found.lifetime, TwoRates)
        assert open_band.low < found.losses_per_h.value < 3600.0 / SHORTEST_MEAN_S
    assert spot_traces("us-west-2c_v100_1")
    load_spot_traces.cache_clear()
