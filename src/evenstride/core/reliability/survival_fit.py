"""Models of the lifetimes of transient machines, fitted to recordings.

A recording of lives is cut on both sides. Machines that still run when it ends are *censored*: it
is only known that they live longer. A machine that is observed every few minutes ends somewhere in
between, so a death is an interval rather than a moment. Likelihoods here are probabilities of those
intervals. That also makes the fit of a bathtub well posed: its density can become arbitrarily high
at the oldest death (by an ever sharper end), but a probability cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import atanh, exp, inf, isfinite, log

import numpy as np
import numpy.typing as npt

from evenstride.core.arrays import FloatArray
from evenstride.core.reliability.lifetimes import (
    Bathtub,
    Exponential,
    Lifetime,
    TwoRates,
)
from evenstride.errors import ConfigError

_FEWEST_DEATHS = 10  # for three or four parameters
_CLEARLY = 2.0  # difference of AIC below which two models count as equally good
_KEPT_STARTS = 3
_FEW_STEPS, _MANY_STEPS = 120, 500  # of the simplex
_FIRST_WIDTH = 0.5  # of the simplex
_LATE = 3.0  # earliest start of the late phase, in units of tau2
_WIDEST = 100.0  # longest time constant, in units of the oldest age


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """The recorded lives of ``n`` machines.

    Args:
        age_s: the age at which each was lost, or last seen, ``(n,)``, at least 0.
        lost: whether it was lost; the others are only known to live longer, ``(n,)``.
        resolution_s: resolution of the ages of loss, half of it to either side. Above 0.

    Raises:
        ConfigError: there are no machines, or a value is outside its range.
    """

    age_s: FloatArray
    lost: npt.NDArray[np.bool_]
    resolution_s: float = 1.0

    def __post_init__(self) -> None:
        ages, width_s = self.age_s, self.resolution_s
        if not len(ages) or len(ages) != len(self.lost) or not (ages >= 0.0).all():
            raise ConfigError(
                f"invalid lives with {len(ages)} ages and {len(self.lost)} ends: expected at least "
                "one machine, as many ends as ages, and no age below 0; leave out machines that "
                "were never seen"
            )
        if not 0.0 < width_s < inf or not (ages[self.lost] >= 0.5 * width_s).all():
            raise ConfigError(
                f"invalid resolution of {width_s} s for ages of loss: it must be above 0 s, and "
                "half of it at most the shortest life; give the time between two observations"
            )

    @property
    def deaths(self) -> int:
        """Number of lost machines."""
        return int(np.count_nonzero(self.lost))


@dataclass(frozen=True, slots=True)
class FittedLifetime:
    """A model with its best-fitting parameters.

    Args:
        lifetime: the model.
        parameters: number of fitted parameters.
        log_likelihood: logarithm of the probability of the recording.
        distance: largest difference to the Kaplan-Meier curve, 0 to 1 (Kolmogorov-Smirnov).
    """

    lifetime: Exponential | TwoRates | Bathtub
    parameters: int
    log_likelihood: float
    distance: float

    @property
    def aic(self) -> float:
        """Akaike's criterion; lower is better."""
        return 2.0 * self.parameters - 2.0 * self.log_likelihood


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model of lifetimes to use.

    Args:
        fit: of the chosen model.
        others: of the other models, if they could be fitted.
        reason: one plain sentence.
    """

    fit: FittedLifetime
    others: tuple[FittedLifetime, ...]
    reason: str


def kaplan_meier(lives: Lives) -> tuple[FloatArray, FloatArray]:
    """Return the ages in seconds of losses, ascending, and the fraction left after each.

    A machine last seen at the age at which another was lost was at risk then.
    Source:
        Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 1958,
        doi:10.1080/01621459.1958.10501452.

    >>> import numpy as np
    >>> ages, lost = np.array([1.0, 2.0, 2.0, 3.0]), np.array([True, True, False, True])
    >>> [column.tolist() for column in kaplan_meier(Lives(ages, lost))]
    [[1.0, 2.0, 3.0], [0.75, 0.5, 0.0]]
    """
    ages, deaths = np.unique(lives.age_s[lives.lost], return_counts=True)
    at_risk = len(lives.age_s) - np.searchsorted(np.sort(lives.age_s), ages, side="left")
    return ages, np.asarray(np.cumprod(1.0 - deaths / at_risk), dtype=np.float64)


def log_likelihood(lifetime: Lifetime, lives: Lives) -> float:
    """Return the logarithm of the probability of the recording; minus infinity if it is 0."""
    ages, half_s = lives.age_s[lives.lost], 0.5 * lives.resolution_s
    lost = lifetime.survival(ages - half_s) - lifetime.survival(ages + half_s)
    left = lifetime.survival(lives.age_s[~lives.lost])
    with np.errstate(divide="ignore"):
        return float(np.log(lost).sum() + np.log(left).sum())


def distance(lifetime: Lifetime, lives: Lives) -> float:
    """Return the largest difference between a model and the Kaplan-Meier curve, 0 to 1.

    It is evaluated where the curve is known, at both ends of each interval of a loss.
    """
    ages, after = kaplan_meier(lives)
    if not len(ages):
        return 0.0
    before, half_s = np.concatenate([[1.0], after[:-1]]), 0.5 * lives.resolution_s
    low = np.abs(lifetime.survival(ages - half_s) - before)
    high = np.abs(lifetime.survival(ages + half_s) - after)
    return float(np.maximum(low, high).max())


def fit_exponential(lives: Lives) -> FittedLifetime:
    """Return the constant rate under which the recording is most likely.

    With ``n`` losses known to ``r`` seconds and ``T`` seconds of machine time, the
    rate is ``(2 / r) atanh(n r / 2 T)``; for exact ages it is ``n / T``.

    Raises:
        ConfigError: no machine was lost, so any rate is too high.
    """
    if not lives.deaths:
        raise ConfigError(
            f"cannot fit a rate of loss to {len(lives.age_s)} machines: none of them was lost; "
            "record for longer, or use an estimate with a prior (`Saving`)"
        )
    half_s, total_s = 0.5 * lives.resolution_s, float(lives.age_s.sum())
    # If all end within one interval, any rate is too low; this one leaves one in a million.
    part = min(lives.deaths * half_s / total_s, 1.0 - 1e-6)
    return _judged(Exponential(half_s / atanh(part)), 1, lives)


def fit_two_rates(lives: Lives) -> FittedLifetime:
    """Return the mixture of two rates under which the recording is most likely.

    Args:
        lives: at least ten of them lost.

    Raises:
        ConfigError: fewer were lost.

    Cost:
        Some hundred evaluations of the recording; 0.1 s for a thousand lives.
    """
    _check_enough(lives, "two rates")
    mean_s = float(fit_exponential(lives).lifetime.mean_left_s(0.0))
    least = log(0.1 * lives.resolution_s / mean_s)

    def mixture(point: FloatArray) -> TwoRates | None:
        """Return the mixture at (logit of the fraction, logs of short life and excess ratio)."""
        if abs(point[0]) > 15.0 or point[1] < least or np.abs(point[1:]).max() > 15.0:
            return None
        short_s, times = mean_s * exp(point[1]), 1.0 + exp(point[2])
        return TwoRates(1.0 / (1.0 + exp(-point[0])), short_s, short_s * times)

    def unlikely(point: FloatArray) -> float:
        mixed = mixture(point)
        return inf if mixed is None else -log_likelihood(mixed, lives)

    starts = [np.array([at, log(early), log(5.0)]) for at in (-1.0, 1.0) for early in (0.1, 0.5)]
    ends = [lowest(unlikely, start, _MANY_STEPS) for start in starts]
    # Again from the best end: a simplex may shrink before it reaches the minimum.
    best = mixture(lowest(unlikely, min(ends, key=unlikely), _MANY_STEPS))
    assert best is not None, "the starts are within the bounds"
    return _judged(best, 3, lives)


def fit_bathtub(lives: Lives, max_life_s: float = inf) -> FittedLifetime:
    """Return the bathtub under which the recording is most likely.

    From 18 fixed starts, the curve is fitted to that of Kaplan and Meier by least squares. From the
    best three of these, the likelihood is maximised. Both use a simplex search; nothing is random.

    Args:
        lives: at least ten of them lost.
        max_life_s: the provider's limit in seconds, if it has one.

    Raises:
        ConfigError: fewer were lost, or one was older than the limit allows.

    Cost:
        Some thousand evaluations of the recording; 0.5 s for a thousand lives.
    """
    oldest_s = float(lives.age_s.max())
    _check_enough(lives, "a bathtub")
    if oldest_s - 0.5 * lives.resolution_s >= max_life_s:
        raise ConfigError(
            f"a machine reached an age of {oldest_s:.0f} s, above the limit of {max_life_s:.0f} s; "
            "raise max_life_s, or set it to infinity if the provider has no limit"
        )
    ages, left = kaplan_meier(lives)

    def curve(point: FloatArray) -> Bathtub | None:
        return searched(point, oldest_s, lives.resolution_s, max_life_s)

    def misfit(point: FloatArray) -> float:
        tub = curve(point)
        return inf if tub is None else float(((tub.survival(ages) - left) ** 2).sum())

    def unlikely(point: FloatArray) -> float:
        tub = curve(point)
        return inf if tub is None else -log_likelihood(tub, lives)

    near = sorted((lowest(misfit, at, _FEW_STEPS) for at in search_starts()), key=unlikely)
    ends = [lowest(unlikely, at, _MANY_STEPS) for at in near[:_KEPT_STARTS]]
    ends = [lowest(unlikely, min(ends, key=unlikely), _MANY_STEPS), *ends]
    best = curve(min(ends, key=unlikely))
    assert best is not None, "the starts are within the bounds"
    return _judged(best, 4, lives)


def _check_enough(lives: Lives, what: str) -> None:
    if lives.deaths < _FEWEST_DEATHS:
        raise ConfigError(
            f"cannot fit {what} to {lives.deaths} losses: expected at least {_FEWEST_DEATHS}; "
            "record for longer, or fit a constant rate"
        )


def choose(lives: Lives, max_life_s: float = inf) -> ChosenModel:
    """Return the model of lifetimes that fits the recording best.

    It is the simplest model whose Akaike criterion is less than two above the lowest one.

    Args:
        lives: at least one of them lost.
        max_life_s: the provider's limit in seconds, if it has one.

    Raises:
        ConfigError: none was lost, or one was older than the limit allows.

    Source:
        Akaike, "A new look at the statistical model identification", IEEE TAC 1974,
        doi:10.1109/TAC.1974.1100705; the margin of two is the usual one.
    """
    plain = fit_exponential(lives)
    if lives.deaths < _FEWEST_DEATHS:
        few = f"{lives.deaths} losses are too few to detect a change with age"
        return ChosenModel(plain, (), f"{_named(plain)}: {few}")
    fits = (plain, fit_two_rates(lives), fit_bathtub(lives, max_life_s))
    least = min(fit.aic for fit in fits)
    # The models are in order of their parameters, so the first that is good enough is simplest.
    fit = next(fit for fit in fits if fit.aic < least + _CLEARLY)
    others = tuple(other for other in fits if other is not fit)
    against = " and ".join(f"{other.aic:.0f} for {_kind(other)}" for other in others)
    verdict = f"AIC {fit.aic:.0f}, against {against}, over {lives.deaths} losses"
    return ChosenModel(fit, others, f"{_named(fit)}: {verdict}")


def _judged(
    lifetime: Exponential | TwoRates | Bathtub, parameters: int, lives: Lives
) -> FittedLifetime:
    likely, far = log_likelihood(lifetime, lives), distance(lifetime, lives)
    assert isfinite(likely), "a fitted model allows for its data"
    return FittedLifetime(lifetime, parameters, likely, far)


def _named(fit: FittedLifetime) -> str:
    match fit.lifetime:
        case Exponential(mean_s):
            return f"a constant rate with a mean life of {mean_s / 3600.0:.3g} h"
        case TwoRates(part, short_s, long_s):
            lives = f"{short_s / 3600.0:.3g} h ({part:.0%}) and {long_s / 3600.0:.3g} h"
            return f"two rates, with mean lives of {lives}"
        case tub:
            early, end = tub.tau1_s / 3600.0, tub.end_s / 3600.0
            return f"a bathtub, with losses early ({early:.3g} h) and until {end:.3g} h"


def _kind(fit: FittedLifetime) -> str:
    kinds = {Exponential: "a constant rate", TwoRates: "two rates", Bathtub: "a bathtub"}
    return kinds[type(fit.lifetime)]


def lowest(function: Callable[[FloatArray], float], start: FloatArray, steps: int) -> FloatArray:
    """Return the minimum of a function, by a simplex search from a point at which it is finite.

    The function is infinite outside the search region. The search stops after ``steps`` steps, or
    earlier if it converges.
    Source:
        Nelder and Mead, "A simplex method for function minimization", The Computer Journal 1965,
        doi:10.1093/comjnl/7.4.308.
    """
    points = np.vstack([start, start + _FIRST_WIDTH * np.eye(len(start))])
    values = np.array([function(point) for point in points])
    for _ in range(steps):
        order = np.argsort(values, kind="stable")
        points, values = points[order], values[order]
        # Both: corners on two sides of a valley can be equally high and far apart.
        if values[-1] - values[0] < 1e-9 and np.ptp(points, axis=0).max() < 1e-5:
            break
        middle = points[:-1].mean(axis=0)
        away = middle - points[-1]
        _replace_worst(function, points, values, middle, away)
    return np.asarray(points[np.argmin(values)])


def _replace_worst(
    function: Callable[[FloatArray], float],
    points: FloatArray,
    values: FloatArray,
    middle: FloatArray,
    away: FloatArray,
) -> None:
    """Reflect the worst corner, stretch or shrink it, or shrink all towards the best; in place."""
    reflected = function(middle + away)
    if reflected < values[0]:
        stretched = function(middle + 2.0 * away)
        far = stretched < reflected
        points[-1] = middle + (2.0 if far else 1.0) * away
        values[-1] = min(stretched, reflected)
    elif reflected < values[-2]:
        points[-1], values[-1] = middle + away, reflected
    else:
        near = middle + (0.5 if reflected < values[-1] else -0.5) * away
        shrunk = function(near)
        if shrunk < min(reflected, values[-1]):
            points[-1], values[-1] = near, shrunk
        else:
            points[1:] = 0.5 * (points[0] + points[1:])
            values[1:] = [function(point) for point in points[1:]]


def search_starts() -> list[FloatArray]:
    """Return points of (logit of a; logs of tau1, tau2 and the distance of the end)."""
    return [
        np.array([log(a / (1.0 - a)), log(early), log(late), log(beyond)])
        for a in (0.25, 0.5, 0.9)
        for early in (0.02, 0.1, 0.5)
        for late, beyond in ((0.03, 0.02), (0.2, 0.1))
    ]


def searched(
    point: FloatArray, oldest_s: float, resolution_s: float, max_life_s: float
) -> Bathtub | None:
    """Return the bathtub at a point, in units of the oldest age; ``None`` outside the bounds.

    The search varies the end of the curve rather than ``b``, so the curve never ends before the
    oldest machine. ``b`` is at least three times ``tau2``: with a late phase from the start, the
    curve would not be a bathtub but any smooth curve.
    """
    # Time constants far below the resolution cannot be distinguished.
    least = log(0.1 * resolution_s / oldest_s)
    # Beyond a logit of 15, a fraction is 0 or 1 within three in ten million.
    if not (np.abs(point[0]) < 15.0 and -15.0 < point[3] < log(_WIDEST)):
        return None
    if not all(least < value < log(_WIDEST) for value in point[1:3]):
        return None
    a, (tau1_s, tau2_s) = 1.0 / (1.0 + exp(-point[0])), (oldest_s * np.exp(point[1:3])).tolist()
    end_s = oldest_s * (1.0 + exp(point[3]))
    late = log(1.0 / a - 1.0 + exp(-end_s / tau1_s))
    b_s = end_s - tau2_s * late
    return Bathtub(a, tau1_s, tau2_s, b_s, max_life_s) if b_s >= _LATE * tau2_s else None
