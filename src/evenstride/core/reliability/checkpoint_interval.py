"""The checkpoint interval: the cost of saves against the work that a loss would destroy.

The loss of any worker stops the step, so the sum of the workers' hazards counts. At a constant
hazard ``h``, training for ``w`` seconds between saves of ``C`` seconds takes

    (exp(h (w + C)) - 1) / (h w)

seconds per useful second (Daly 2006, without the restart time, which does not affect the choice).
It is least where ``h w = 1 - exp(-h (w + C))``. Daly's formula is a series for that ``w``, and
Young's (1974) is its first term; here the equation itself is solved.

If the hazard changes with age, so does the best density of saves: ``1 / w(h)`` per second at each
moment. To first order, time is lost at a rate of ``C n + h / 2n`` with ``n`` saves per second, and
the minimum of the total is the minimum at each moment (Ling, Mi and Lin 2001). So the next save is
due when the integral of the density since the last save reaches one.

It does not work to choose only the next interval for the least loss per useful time: if the hazard
falls, as on young machines, such an interval grows without limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from numbers import Real

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.reliability.lifetimes import DAY_S, Exponential, Lifetime
from evenstride.errors import ConfigError

_CELLS = 96  # number of intervals until the latest possible save
_REFINEMENTS = 8  # Newton steps of a solution, each of which doubles the digits
_BY_DEFAULT = Exponential(DAY_S)
_OF_A_LIFETIME = ("survival", "hazard_per_s", "mean_left_s", "quantile_s")


def young_s(save_s: float, mean_s: float) -> float:
    """Return the interval between saves in seconds, to first order: ``sqrt(2 C M)``.

    Args:
        save_s: duration of a save.
        mean_s: mean time between losses of *any* worker.

    Source:
        Young, "A first order approximation to the optimum checkpoint interval", CACM 1974,
        doi:10.1145/361147.361115.
    """
    return sqrt(2.0 * save_s * mean_s)


def daly_s(save_s: float, mean_s: float) -> float:
    """Return the interval between saves in seconds, to higher order.

    ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C``, and ``M`` if ``C`` is ``2 M`` or
    more. It is the training time from the end of a save to the start of the next.

    Args:
        save_s: duration of a save.
        mean_s: mean time between losses of *any* worker.

    Source:
        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        FGCS 2006, doi:10.1016/j.future.2004.11.016; checked against the paper's three values.

    >>> [round(daly_s(5.0, mean), 1) for mean in (1440.0, 360.0, 15.0)]  # 117, 57, 9.1 minutes
    [116.7, 56.7, 9.1]
    """
    if save_s >= 2.0 * mean_s:
        return mean_s
    part = save_s / (2.0 * mean_s)
    return young_s(save_s, mean_s) * (1.0 + sqrt(part) / 3.0 + part / 9.0) - save_s


@dataclass(frozen=True, slots=True)
class Observed:
    """The losses of a run so far.

    Args:
        failures: number of workers lost, over all processes of the run.
        expected: number of losses expected by the model of lifetimes, see `expected_losses`;
            at a constant rate, the seconds of all workers together divided by the mean life.
    """

    failures: int = 0
    expected: float = 0.0


@dataclass(frozen=True, slots=True)
class Saving:
    """How to decide when to save.

    Args:
        lifetime: of one machine. The default is a constant rate of one loss per day and
            machine, which is the limit of the shortest-lived machines on offer. On longer-lived
            machines, the observations soon outweigh it.
        prior_failures: weight of the model, as a number of losses. Hazards are those of the
            model times ``(failures + prior) / (expected + prior)``: the mean of the gamma
            distribution after observed Poisson losses. One loss is the weakest prior
            that still gives a rate before the first loss.
        most_part: largest fraction of the training time for saves.
        longest_s: longest time between two saves, unless ``most_part`` requires more.

    Raises:
        ConfigError: a value is of another type, or outside its range.
    """

    lifetime: Lifetime = _BY_DEFAULT
    prior_failures: float = 1.0
    most_part: float = 0.1
    longest_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_lifetime(self.lifetime)
        if not (_is_number(self.most_part) and 0.0 < self.most_part <= 1.0):
            raise ConfigError(
                f"invalid most_part {self.most_part!r}: the fraction of the training time for "
                "saves must be above 0 and at most 1; 0.1 is one tenth"
            )
        for name, value in (("prior_failures", self.prior_failures), ("longest_s", self.longest_s)):
            if not (_is_number(value) and 0.0 < value < inf):
                raise ConfigError(
                    f"{name}={value!r} is invalid: expected a finite number above 0; or omit it"
                )

    def factor(self, observed: Observed) -> float:
        """Return the ratio of this run's hazards to those of the model."""
        prior = self.prior_failures
        return (observed.failures + prior) / (observed.expected + prior)


def _is_number(value: object) -> bool:
    # True is a number in Python.
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_lifetime(lifetime: object) -> None:
    """Reject an invalid `Lifetime` at once: later only the leader would fail."""
    named = all(callable(getattr(lifetime, name, None)) for name in _OF_A_LIFETIME)
    if isinstance(lifetime, type) or not named:
        raise ConfigError(
            f"lifetime={lifetime!r} is not a lifetime: give Exponential, TwoRates or Bathtub, or "
            f"an object with {', '.join(_OF_A_LIFETIME)}; for a mean life of one day write "
            "Exponential(86400.0), or omit it"
        )


@dataclass(frozen=True, slots=True)
class NextSave:
    """When to save next.

    Args:
        in_s: seconds of training from the end of the last save.
        reason: one plain sentence.
    """

    in_s: float
    reason: str


def expected_losses(lifetime: Lifetime, from_s: FloatArray, to_s: FloatArray) -> float:
    """Return the expected number of losses between two ages of each machine, ``(W,)``.

    Ages are in seconds. Machines older than the model's maximum count with its mean rate.
    """
    return float(_hazard(lifetime, from_s, to_s).sum())


def next_save_in_s(
    save_s: float,
    ages_s: FloatArray,
    observed: Observed = Observed(),
    saving: Saving = Saving(),
) -> NextSave:
    """Return the training time until the next save, and the reason.

    Args:
        save_s: duration for which a save stops training, above 0.
        ages_s: of the workers' machines, ``(W,)``, at the end of the last save; with a constant
            rate, any numbers will do.
        observed: losses so far.
        saving: the model of lifetimes, and the bounds.

    Raises:
        ConfigError: there is no worker, or ``save_s`` is not above 0 and finite.

    Cost:
        ``O(k)`` for ``k`` different ages, about 1,000 hazards each.
    """
    if not 0.0 < save_s < inf or not len(ages_s):
        raise ConfigError(
            f"cannot schedule a save of {save_s} s for {len(ages_s)} workers: expected a finite "
            "time above 0 and at least one worker; measure how long a save stops training"
        )
    factor = saving.factor(observed)
    least_s = save_s / saving.most_part
    # If the bounds contradict each other, the limit on the cost of saves holds.
    if least_s >= saving.longest_s:
        why = f"a save takes {save_s:.4g} s, at most {saving.most_part:.0%} of the time"
        return NextSave(least_s, f"next save in {least_s:.4g} s: {why}")
    due_s = due_in_s(saving.lifetime, ages_s, save_s, saving.longest_s, factor)
    in_s = max(due_s, least_s)
    risk = factor * expected_losses(saving.lifetime, ages_s, ages_s + in_s)
    bound = ""
    if due_s < least_s:
        bound = f"; a shorter interval would exceed {saving.most_part:.0%} of the time"
    elif due_s >= saving.longest_s:
        bound = f"; a longer interval exceeds the limit of {saving.longest_s:.4g} s"
    losses = f"{risk:.2g} losses expected" if risk < inf else "one reaches the end of its life"
    machines = f"machines: {len(ages_s)}, {losses} until then"
    why = f"a save takes {save_s:.3g} s, {machines}{bound}"
    return NextSave(in_s, f"next save in {in_s:.4g} s: {why}")


def due_in_s(
    lifetime: Lifetime,
    ages_s: FloatArray,
    save_s: float,
    longest_s: float,
    factor: float = 1.0,
) -> float:
    """Return the seconds of training until the next save is due.

    Args:
        lifetime: of one machine.
        ages_s: of the machines now, ``(W,)``.
        save_s: duration of a save, above 0.
        longest_s: upper limit of the result.
        factor: factor of the hazards.

    Returns:
        The time at which the integral of the density of saves reaches one. It is cut where a
        machine reaches its maximum age, so that the save ends before; 0 if that is too late.

    Source:
        The density is that of Ling, Mi and Lin, "A variational calculus approach to optimal
        checkpoint placement", IEEE Transactions on Computers 2001, doi:10.1109/12.936236. We use
        Daly's exact interval at each moment instead of Young's.
    """
    # Machines of equal age count once, or ten thousand of them would cost as many hazards.
    ages, machines = np.unique(ages_s, return_counts=True)
    edges_s = np.linspace(0.0, longest_s, _CELLS + 1)
    grown = ages[:, np.newaxis] + edges_s
    summed = factor * (machines @ _hazard(lifetime, grown[:, :-1], grown[:, 1:]))
    saves = saves_per_s(save_s, summed / np.diff(edges_s)) * np.diff(edges_s)
    due = np.concatenate([[0.0], np.cumsum(saves)])
    safe_s = _until_the_end_s(lifetime, ages, save_s, edges_s)
    if due[-1] < 1.0:
        return min(longest_s, safe_s)
    at = int(np.searchsorted(due, 1.0))
    part = (1.0 - due[at - 1]) / saves[at - 1]  # 0 if the hazard is infinite
    return min(float(edges_s[at - 1] + part * (edges_s[at] - edges_s[at - 1])), safe_s)


def saves_per_s(save_s: float, hazard_per_s: FloatArray) -> FloatArray:
    """Return the best density of saves at constant hazards, in saves per second of training.

    Its inverse is the ``w`` with ``h w = 1 - exp(-h (w + C))``, solved to floating-point accuracy.

    Args:
        save_s: duration of a save, ``C``.
        hazard_per_s: of all workers together, ``h``, any shape; 0 and infinity are allowed.
    """
    rate = np.asarray(hazard_per_s, dtype=np.float64)
    # At a rate of 0 any cost will do, because the density is 0 divided by something.
    cost = save_s * np.where(rate > 0.0, rate, 1.0)
    part = np.minimum(np.sqrt(2.0 * cost), 1.0)  # Young's, which is never too short
    for _ in range(_REFINEMENTS):
        part = part + (part + np.expm1(-(part + cost))) / np.expm1(-(part + cost))
    return np.asarray(rate / part)


def _until_the_end_s(
    lifetime: Lifetime, ages: FloatArray, save_s: float, edges_s: FloatArray
) -> float:
    """Return the latest start of a save that ends before a machine reaches its maximum age."""
    # Infinite if all reach the horizon, or if the end has passed already.
    young = ages[lifetime.survival(ages) > 0.0]
    # A save that ends after a machine's end is useless.
    gone = lifetime.survival(young[:, np.newaxis] + edges_s + save_s) <= 0.0
    late = np.flatnonzero(gone.any(axis=0))
    if not len(late):
        return inf
    return float(edges_s[max(int(late[0]) - 1, 0)])


def _hazard(lifetime: Lifetime, from_s: FloatArray, to_s: FloatArray) -> FloatArray:
    """Return the integrated hazard between two ages; infinite beyond the maximum age."""
    # A machine older than the maximum has disproved the model; it counts with the mean rate.
    from_s, to_s = np.broadcast_arrays(from_s, to_s)
    before, after = lifetime.survival(from_s), lifetime.survival(to_s)
    known = before > 0.0
    with np.errstate(divide="ignore"):
        aged = -np.log(after / np.where(known, before, 1.0))
    return np.where(known, aged, (to_s - from_s) / float(lifetime.mean_left_s(0.0)))
