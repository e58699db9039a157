"""How often to save: a balance of what saving costs and what a loss would throw away.

Any lost worker stops the step, so it is the sum of the workers' hazards that counts. Training for
``w`` seconds at a time and saving in ``C``, at a constant hazard ``h``, takes

    (exp(h (w + C)) - 1) / (h w)

seconds per useful one (Daly 2006, but for what a restart takes, which has no part in the choice).
It is least where ``h w = 1 - exp(-h (w + C))``. Daly's formula is a series for that ``w``, and
Young's (1974) the first term of it; here the equation itself is solved.

A hazard that changes with age asks for saves in a density that changes with it: ``1 / w(h)`` per
second, each moment's own. To first order time is lost at a rate of ``C n + h / 2n`` with ``n``
saves per second, and what minimises the whole of it minimises it at each moment (Ling, Mi and
Lin 2001). So the next save is due when the density, summed up from the last one on, reaches one.

To ask for the next interval with the least loss per useful time on its own does not work: where the
hazard falls, as on young machines, such an interval grows for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from numbers import Real

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.reliability.lifetimes import DAY_S, Exponential, Lifetime
from evenstride.errors import ConfigError

_CELLS = 96  # that the time until the latest possible save is divided into
_REFINEMENTS = 8  # of an equation's solution, each of which doubles the digits
_BY_DEFAULT = Exponential(DAY_S)
_OF_A_LIFETIME = ("survival", "hazard_per_s", "mean_left_s", "quantile_s")


def young_s(save_s: float, mean_s: float) -> float:
    """Return the interval between saves in seconds, to first order: ``sqrt(2 C M)``.

    Args:
        save_s: what a save takes.
        mean_s: mean time between losses of *any* worker.

    Source:
        Young, "A first order approximation to the optimum checkpoint interval", CACM 1974,
        doi:10.1145/361147.361115.
    """
    return sqrt(2.0 * save_s * mean_s)


def daly_s(save_s: float, mean_s: float) -> float:
    """Return the interval between saves in seconds, to higher order.

    ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C``, and ``M`` where ``C`` is ``2 M`` or
    more. It is the time of training alone, from the end of a save to the start of the next.

    Args:
        save_s: what a save takes.
        mean_s: mean time between losses of *any* worker.

    Source:
        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        FGCS 2006, doi:10.1016/j.future.2004.11.016; checked against the three figures he gives.

    >>> [round(daly_s(5.0, mean), 1) for mean in (1440.0, 360.0, 15.0)]  # 117, 57, 9.1 minutes
    [116.7, 56.7, 9.1]
    """
    if save_s >= 2.0 * mean_s:
        return mean_s
    part = save_s / (2.0 * mean_s)
    return young_s(save_s, mean_s) * (1.0 + sqrt(part) / 3.0 + part / 9.0) - save_s


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run has seen of losses so far.

    Args:
        failures: workers lost, over all the run's lives.
        expected: how many the model of lifetimes would have let expect, see `expected_losses`;
            at a constant rate the seconds of all workers together, over the mean life.
    """

    failures: int = 0
    expected: float = 0.0


@dataclass(frozen=True, slots=True)
class Saving:
    """How to decide when to save.

    Args:
        lifetime: of one machine. Without a better one: a constant rate, and a loss per day and
            machine, which is the limit of the shortest-lived machines on offer. On machines that
            last, it is soon outweighed by what is observed.
        prior_failures: how many losses the model is worth as evidence. Hazards are those of the
            model times ``(failures + prior) / (expected + prior)``: the mean of a gamma
            distribution that Poisson losses were observed under. One loss is the weakest
            that is still a rate before the first.
        most_part: of the training time that saving may take.
        longest_s: between two saves, unless ``most_part`` demands more.

    Raises:
        ConfigError: a value is of another kind, or outside its range.
    """

    lifetime: Lifetime = _BY_DEFAULT
    prior_failures: float = 1.0
    most_part: float = 0.1
    longest_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_lifetime(self.lifetime)
        if not (_is_number(self.most_part) and 0.0 < self.most_part <= 1.0):
            raise ConfigError(
                f"saving may take {self.most_part!r} of the training time: it must be above 0 and "
                "at most 1; 0.1 is one tenth"
            )
        for name, value in (("prior_failures", self.prior_failures), ("longest_s", self.longest_s)):
            if not (_is_number(value) and 0.0 < value < inf):
                raise ConfigError(
                    f"{name}={value!r}: it must be above 0 and finite, a number; leave it out"
                )

    def factor(self, observed: Observed) -> float:
        """Return how many times the model's hazards those of this run are."""
        prior = self.prior_failures
        return (observed.failures + prior) / (observed.expected + prior)


def _is_number(value: object) -> bool:
    # True is a number to Python.
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_lifetime(lifetime: object) -> None:
    """Refuse what is no `Lifetime` at once: later only the leader asks it, and would fail alone."""
    named = all(callable(getattr(lifetime, name, None)) for name in _OF_A_LIFETIME)
    if isinstance(lifetime, type) or not named:
        raise ConfigError(
            f"lifetime={lifetime!r} does not say how long a machine lives: give Exponential, "
            f"TwoRates or Bathtub, or an object with {', '.join(_OF_A_LIFETIME)}; for a mean "
            "life of a day write Exponential(86400.0), or leave it out"
        )


@dataclass(frozen=True, slots=True)
class NextSave:
    """When to save next.

    Args:
        in_s: seconds of training, from the end of the last save on.
        reason: one plain sentence.
    """

    in_s: float
    reason: str


def expected_losses(lifetime: Lifetime, from_s: FloatArray, to_s: FloatArray) -> float:
    """Return how many machines a model lets expect to lose between two ages of each, ``(W,)``.

    Ages are in seconds. Machines that are older than the model allows count with its mean rate.
    """
    return float(_hazard(lifetime, from_s, to_s).sum())


def next_save_in_s(
    save_s: float,
    ages_s: FloatArray,
    observed: Observed = Observed(),
    saving: Saving = Saving(),
) -> NextSave:
    """Return after how many seconds of training to save next.

    Args:
        save_s: how long training stands still for a save, above 0.
        ages_s: of the workers' machines, ``(W,)``, at the end of the last save; where they are not
            known and the rate is constant, any numbers will do.
        observed: losses so far.
        saving: the model of lifetimes, and the bounds.

    Raises:
        ConfigError: there is no worker, or ``save_s`` is not above 0 and finite.

    Cost:
        ``O(k)`` for ``k`` different ages, some 1,000 hazards each.
    """
    if not 0.0 < save_s < inf or not len(ages_s):
        raise ConfigError(
            f"the next save of {len(ages_s)} workers, which takes {save_s} s: there must be at "
            "least one worker, and a time above 0; measure how long a save holds training up"
        )
    factor = saving.factor(observed)
    least_s = save_s / saving.most_part
    # The two bounds contradict each other; what saving may cost is the one that holds.
    if least_s >= saving.longest_s:
        why = f"a save takes {save_s:.4g} s, and may take {saving.most_part:.0%} of the time"
        return NextSave(least_s, f"next save in {least_s:.4g} s: {why}")
    due_s = due_in_s(saving.lifetime, ages_s, save_s, saving.longest_s, factor)
    in_s = max(due_s, least_s)
    risk = factor * expected_losses(saving.lifetime, ages_s, ages_s + in_s)
    bound = ""
    if due_s < least_s:
        bound = f"; sooner would take more than {saving.most_part:.0%} of the time"
    elif due_s >= saving.longest_s:
        bound = f"; later might do, but {saving.longest_s:.4g} s is the longest allowed"
    losses = f"{risk:.2g} losses expected" if risk < inf else "one reaches the end of its life"
    told = f"machines: {len(ages_s)}, {losses} until then"
    return NextSave(in_s, f"next save in {in_s:.4g} s: a save takes {save_s:.3g} s, {told}{bound}")


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
        save_s: what a save takes, above 0.
        longest_s: no later than this.
        factor: by which hazards are multiplied.

    Returns:
        The time at which the density of saves sums up to one. It is cut where a machine reaches
        an age that nobody exceeds, so that the save is over by then; 0 if that is too late.

    Source:
        the density is that of Ling, Mi and Lin, "A variational calculus approach to optimal
        checkpoint placement", IEEE Transactions on Computers 2001, doi:10.1109/12.936236; that each
        moment's own is Daly's exact one rather than Young's is ours.
    """
    # Machines that came up together count once, or ten thousand of them would cost as many hazards.
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
    part = (1.0 - due[at - 1]) / saves[at - 1]  # 0 where the hazard is infinite
    return min(float(edges_s[at - 1] + part * (edges_s[at] - edges_s[at - 1])), safe_s)


def saves_per_s(save_s: float, hazard_per_s: FloatArray) -> FloatArray:
    """Return the best density of saves at constant hazards, in saves per second of training.

    Its inverse is the ``w`` with ``h w = 1 - exp(-h (w + C))``, solved as exactly as floats allow.

    Args:
        save_s: what a save takes, ``C``.
        hazard_per_s: of all workers together, ``h``, any shape; 0 and infinity are allowed.
    """
    rate = np.asarray(hazard_per_s, dtype=np.float64)
    # Any cost does for a rate of 0, as its density is 0 over something.
    cost = save_s * np.where(rate > 0.0, rate, 1.0)
    part = np.minimum(np.sqrt(2.0 * cost), 1.0)  # Young's, which is never too short
    for _ in range(_REFINEMENTS):
        part = part + (part + np.expm1(-(part + cost))) / np.expm1(-(part + cost))
    return np.asarray(rate / part)


def _until_the_end_s(
    lifetime: Lifetime, ages: FloatArray, save_s: float, edges_s: FloatArray
) -> float:
    """Return the last time at which a save ends before a machine has reached its end."""
    # Infinite if all are sure to be possible, or the end is past already.
    young = ages[lifetime.survival(ages) > 0.0]
    # A save that a machine does not live to see the end of saves nothing.
    gone = lifetime.survival(young[:, np.newaxis] + edges_s + save_s) <= 0.0
    late = np.flatnonzero(gone.any(axis=0))
    if not len(late):
        return inf
    return float(edges_s[max(int(late[0]) - 1, 0)])


def _hazard(lifetime: Lifetime, from_s: FloatArray, to_s: FloatArray) -> FloatArray:
    """Return the hazard summed up between two ages; infinite if nobody gets as old."""
    # Who is older already than anybody gets has proved the model wrong, and counts with its mean.
    from_s, to_s = np.broadcast_arrays(from_s, to_s)
    before, after = lifetime.survival(from_s), lifetime.survival(to_s)
    known = before > 0.0
    with np.errstate(divide="ignore"):
        aged = -np.log(after / np.where(known, before, 1.0))
    return np.where(known, aged, (to_s - from_s) / float(lifetime.mean_left_s(0.0)))
