"""How soon spot machines are taken away: from a catalogue's band, or from a recording.

Both tell a rate of losses, neither exactly. A band is wide, and a recording has calm days and bad
ones. So beside the model of one machine's life there are twenty rates that are equally likely: what
a run may cost (`losses`) is worked out at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log1p, sqrt
from statistics import NormalDist

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import Interval
from evenstride.core.reliability.lifetimes import DAY_S, Exponential, Lifetime
from evenstride.core.reliability.survival_fit import choose
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Offer
from evenstride.sim.scenario.spot_traces import Machines

MONTH_S = DAY_S * 365.25 / 12.0
SHORTEST_MEAN_S = 3600.0
"""Mean life at which a band without an upper end is taken to end."""

DRIFT, WAITS_DRIFT, TOGETHER = 0.64, 0.70, 0.54
"""By how much rates, and waits, differ between one stretch of a recording and the next (standard
deviation of the logarithm), and the correlation of the two, over the halves of 27 recordings of 6
to 45 days (``benchmarks/spot_intervals.py``)."""

_QUANTILES = np.array([(n + 0.5) / 20.0 for n in range(20)])
_LEAST_PART = 1e-4  # of a month, that a band from or to 0 counts as
_UNKNOWN = (0.01, 1.0)
_FEWEST_WINDOWS = 10
_FEWEST_LOSSES = 5


@dataclass(frozen=True, slots=True)
class PreemptionRate:
    """How soon machines of a kind are taken away."""

    lifetime: Lifetime  # of one machine
    # At which one is lost, equally likely, ascending; twenty of them
    rates_per_s: tuple[float, ...]
    reason: str  # where this is from, one plain sentence
    # For as many machines as before a loss, as recorded and equally likely; empty if they are not
    # known
    waits_s: tuple[float, ...] = ()

    @property
    def losses_per_h(self) -> Interval:
        """Losses of one machine per hour, with a 95 % interval."""
        mean = 3600.0 / float(self.lifetime.mean_left_s(0.0))
        low, high = 3600.0 * self.rates_per_s[0], 3600.0 * self.rates_per_s[-1]
        return Interval(mean, min(low, mean), max(high, mean))


def from_band(low: float, high: float) -> PreemptionRate:
    """Return what it means that a part of all machines is taken away within a month.

    A part ``p`` of those that are there for the whole month is a rate of ``-ln(1 - p)`` per month;
    within a band all parts are as likely. A band that ends at 1 has no upper end ("more than
    20 %"): there rates count as equally likely on a logarithmic scale, up to a mean life of 1 h.
    That is an assumption, from 18 recordings of V100 machines in regions where they have the open
    band: mean lives were 0.7 to 17 hours.

    Args:
        low: smallest part, 0 to 1.
        high: largest part, not below it; 1 for none.

    Raises:
        ConfigError: they are no such parts.

    >>> band = from_band(0.05, 0.10)
    >>> [round(24 * x, 4) for x in (band.losses_per_h.low, band.losses_per_h.high)]  # per day
    [0.0017, 0.0034]
    """
    if not 0.0 <= low <= high <= 1.0 or low == 1.0:
        raise ConfigError(
            f"a band from {low} to {high}: these are parts of all machines in a month, 0 to 1, the "
            "smaller one first; more than 20 % is written 0.2, 1.0"
        )
    slow = _rate_per_s(max(low, _LEAST_PART))
    if high < 1.0:
        parts = np.maximum(low + (high - low) * _QUANTILES, _LEAST_PART)
        rates = np.array([_rate_per_s(part) for part in parts.tolist()])
        told = f"{low:.0%} to {high:.0%} of machines are taken away in a month"
    else:
        fast = max(1.0 / SHORTEST_MEAN_S, slow)
        rates = slow * (fast / slow) ** _QUANTILES
        told = (
            f"more than {low:.0%} of machines are taken away in a month, how many more nobody "
            f"says; down to a mean life of {SHORTEST_MEAN_S / 3600.0:.0f} h everything is possible"
        )
    middle = sqrt(float(rates[9] * rates[10]))
    return PreemptionRate(Exponential(1.0 / middle), tuple(rates.tolist()), told)


def _rate_per_s(part: float) -> float:
    return -log1p(-part) / MONTH_S


def from_offer(offer: Offer) -> PreemptionRate:
    """Return what a catalogue says of how soon a machine is taken away.

    Where it says nothing, the answer is as wide as ignorance: 1 % in a month, or any more.
    """
    if offer.interruption is not None:
        return from_band(*offer.interruption)
    reason = (
        f"how often {offer.instance_type} is taken away is not known; everything is possible from "
        f"{_UNKNOWN[0]:.0%} in a month to a mean life of {SHORTEST_MEAN_S / 3600.0:.0f} h"
    )
    return replace(from_band(*_UNKNOWN), reason=reason)


def from_recorded(
    recorded: Machines, window_s: float = DAY_S, max_life_s: float = inf, drift: float = DRIFT
) -> PreemptionRate:
    """Return how soon machines are taken away, as estimated from a recording.

    Fits the models of lifetimes and keeps the best (`core.reliability.survival_fit.choose`). Rates
    come from windows of the recording: losses over machine-seconds, each window weighted by its
    machine-seconds. So the rates reflect that losses come together, which a model of single
    machines does not. They are multiplied by a factor for how far future days may differ from the
    recorded ones.

    Where none was lost of those that came while it was recorded, a constant rate stands in, from
    all losses: of machines that were there from the start the age is not known. After fewer than
    five losses, rates are as likely as so few of them make them, since windows would not show them.

    Args:
        recorded: machines and their lives, from `sim.scenario.spot_traces.machines`.
        window_s: length of a window, at best about that of the run; a tenth of the recording at
            most.
        max_life_s: the provider's limit, where there is one.
        drift: standard deviation of that factor's logarithm; 0 for the days that were recorded.

    Raises:
        ConfigError: no machine was lost, or one was older than the limit.
    """
    lifetime, told = _lifetime(recorded, max_life_s)
    losses = int((recorded.gone < len(recorded.who)).sum())
    if losses < _FEWEST_LOSSES:
        rates, of = _rates_of_few(losses, _up_s(recorded)), "rates as likely as so few losses are"
    else:
        rates, count = _window_rates(recorded, window_s)
        of = f"rates of {count} windows of the recording"
    to_come = np.outer(rates, drift_factors(drift, len(rates)))
    found = np.quantile(to_come, _QUANTILES)
    return PreemptionRate(lifetime, tuple(found.tolist()), f"{told}; {of}")


def _lifetime(recorded: Machines, max_life_s: float) -> tuple[Lifetime, str]:
    """Return the model of lives, and a sentence on it."""
    ended = recorded.gone < len(recorded.who)
    losses = int(ended.sum())
    if not losses:
        raise ConfigError(
            f"none of its {len(ended)} machines was lost, so it tells nothing of losses; record "
            "for longer, or leave it out, and the catalogue's figures count"
        )
    if (ended & (recorded.came > 0)).any():
        chosen = choose(recorded.lives(), max_life_s)
        return chosen.fit.lifetime, chosen.reason
    mean_s = _up_s(recorded) / losses
    who = "loss" if losses == 1 else "losses"
    return Exponential(mean_s), (
        f"a constant rate with a mean life of {mean_s / 3600.0:.3g} h: {losses} {who}, all of "
        "machines that were there from the start, whose age is not known"
    )


def _up_s(recorded: Machines) -> float:
    """Return for how long machines were up, all together."""
    return float((recorded.who >= 0).sum()) * recorded.gap_s


def _rates_of_few(losses: int, up_s: float) -> FloatArray:
    """Return equally likely rates after a few losses, which windows would not tell.

    Source:
        The posterior of a Poisson rate with Jeffreys' prior, a gamma distribution, by the formula
        of Wilson and Hilferty (PNAS 1931).
    """
    shape, normal = losses + 0.5, NormalDist()
    z = np.array([normal.inv_cdf(part) for part in _QUANTILES.tolist()])
    cubed = np.maximum(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * sqrt(shape)), 0.05)
    found: FloatArray = shape * cubed**3 / up_s
    return found


def drift_factors(drift: float, count: int) -> FloatArray:
    """Return equally likely factors, as many as are asked for, ascending: a normal logarithm."""
    normal = NormalDist()
    return np.exp([drift * normal.inv_cdf((n + 0.5) / count) for n in range(count)])


def _window_rates(recorded: Machines, window_s: float) -> tuple[FloatArray, int]:
    """Return quantiles of the windows' rates, and how many windows there are."""
    ticks = len(recorded.who)
    each = max(1, min(round(window_s / recorded.gap_s), ticks // _FEWEST_WINDOWS))
    starts = np.arange(0, ticks, each)
    up = np.add.reduceat((recorded.who >= 0).sum(axis=1), starts) * recorded.gap_s
    losses = np.bincount(recorded.gone[recorded.gone < ticks], minlength=ticks)
    lost = np.add.reduceat(losses, starts)
    there = up > 0.0
    rates, weights = lost[there] / up[there], up[there]
    order = np.argsort(rates, kind="stable")
    upto = np.cumsum(weights[order]) / weights.sum()
    places = np.minimum(np.searchsorted(upto, _QUANTILES), len(rates) - 1)
    return np.asarray(rates[order][places]), len(rates)
