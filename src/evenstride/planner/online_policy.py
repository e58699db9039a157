"""Which configuration to train in, decided during training: what to try next, and when to stay.

A configuration is a number of workers and a global batch. Each worker's step time is linear in its
samples, and communication follows from the number of workers. So the two extreme configurations
predict all between them. Each new configuration is measured in turn, and may be left again.
Pure: the same measurements give the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from statistics import NormalDist

from evenstride.core.convergence.batch_laws import MeasuredTraining, gamma_of
from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.planner.online_forecast import (
    Configuration,
    OnlineForecast,
    Probe,
    Trained,
    TrainingJob,
    foresee,
)
from evenstride.planner.search.selection import Objective, frontier, knee
from evenstride.planner.workload.target_runs import PARTS
from evenstride.planner.workload.workload_profile import Noise, surest

USUAL_SWITCH_S = 2.0
"""Assumed cost of a switch in seconds, before the first one."""

MOST_PROBES = 5
"""Phases that measure something, including the first; at most one more switch back follows."""

# Longest wait of a phase for noise that has not settled, as a fraction of the training.
_MOST_WAIT = 0.05
# Largest cost of a trial, as a fraction of the remaining time at best.
_MOST_OVERHEAD = 0.1
# For the knee, where neither time nor cost alone decides: the longest switch, as a fraction of the
# remaining time.
_SMALL = 0.05


@dataclass(frozen=True, slots=True)
class OnlineStanding:
    """The state of a training run."""

    present: Configuration  # the current one
    trained: Trained  # samples at each batch so far
    switch_s: float = USUAL_SWITCH_S  # cost of a switch in seconds
    visits: int = 1  # number of configurations used so far, including the current one
    confirmed: bool = False  # whether a stored model chose the current one, and holds there


@dataclass(frozen=True, slots=True)
class OnlineDecision:
    """The next configuration."""

    to: Configuration | None  # configuration to switch to; ``None`` to stay until the end
    probe: bool  # whether it is only tried to measure it
    reason: str  # one sentence for display
    # Forecasts of all configurations, where possible, the best first
    foreseen: tuple[OnlineForecast, ...] = ()


def extremes(workers: Sequence[int], batches: Sequence[int]) -> tuple[Configuration, Configuration]:
    """Return the fewest workers with the smallest batch, and the most with the largest batch.

    >>> extremes([1, 2, 4], [64, 256])
    (Configuration(workers=1, batch=64), Configuration(workers=4, batch=256))
    """
    possible = choices(workers, batches)
    return min(possible), max(possible)


def choices(workers: Sequence[int], batches: Sequence[int]) -> tuple[Configuration, ...]:
    """Return all configurations, fewest workers first, in which each worker has a sample."""
    return tuple(sorted(Configuration(w, b) for w in set(workers) for b in set(batches) if b >= w))


def best_known(
    job: TrainingJob, possible: Sequence[Configuration], stored: Sequence[Probe]
) -> tuple[OnlineForecast, ...]:
    """Return the forecasts before the first step, by another search's probes, the best first."""
    return _ranked(foresee(job, possible, stored, {}), job.objective)


def decide(
    job: TrainingJob,
    possible: Sequence[Configuration],
    probes: Sequence[Probe],
    standing: OnlineStanding,
) -> OnlineDecision:
    """Return the decision after the present configuration has been measured."""
    found = foresee(job, possible, probes, standing.trained)
    ranked = _ranked(found, job.objective)
    here = next((one for one in found if one.choice == standing.present), None)
    if here is None:
        return _back(standing.present, ranked)
    known = _Comparison(job, here, ranked, probes, standing)
    if here.time_s.value <= 0:
        return known.stay("no training is left")
    if standing.confirmed:
        return known.stay(f"{standing.present} is the best by the stored model, which holds here")
    if standing.visits >= MOST_PROBES:
        return known.last()
    far = max(possible)
    if len({probe.choice for probe in probes}) == 1 and far != standing.present:
        return known.first_look(far)
    best = ranked[0]
    if best.choice == standing.present:
        return known.rival()
    if known.pays(best):
        return known.go(best)
    return known.stay(
        f"{best.choice} would save less than a switch costs ({standing.switch_s:.1f} s)"
    )


def _back(present: Configuration, ranked: tuple[OnlineForecast, ...]) -> OnlineDecision:
    """Leave a batch whose number of epochs is not known."""
    if not ranked:
        why = f"there is no forecast of any configuration except {present}"
        return OnlineDecision(None, False, why)
    to = ranked[0].choice
    why = f"the epochs at a batch of {present.batch} are unknown without measured gradient noise"
    return OnlineDecision(to, False, f"{why}; {to} is the best of the others", ranked)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The input of a decision, if the present configuration has a forecast."""

    job: TrainingJob
    here: OnlineForecast
    ranked: tuple[OnlineForecast, ...]  # all configurations, the best first
    probes: Sequence[Probe]
    standing: OnlineStanding

    def stay(self, why: str) -> OnlineDecision:
        return OnlineDecision(None, False, why, self.ranked)

    def go(self, best: OnlineForecast) -> OnlineDecision:
        return OnlineDecision(
            best.choice,
            False,
            f"{best.choice} is {self._best_in}: the rest would take {best.time_s.value:.0f} s and "
            f"cost {best.cost_usd.value:.3g} USD, instead of {self.here.time_s.value:.0f} s and "
            f"{self.here.cost_usd.value:.3g} USD in the current configuration",
            self.ranked,
        )

    def last(self) -> OnlineDecision:
        """Try nothing more; switch back at most once, to a measured one that is better."""
        best = next(one for one in self.ranked if one.measured)
        once = self.standing.visits == MOST_PROBES and best.choice != self.standing.present
        if once and self.pays(best):
            return self.go(best)
        why = f"{self.here.choice} is {self._best_in} of the measured configurations"
        if best.choice != self.here.choice:
            why = f"{best.choice} would be {self._best_in}, but another switch is not worth it"
        return self.stay(f"{why}; no further trials after {self.standing.visits} phases")

    def first_look(self, far: Configuration) -> OnlineDecision:
        """Try the other extreme, if the remaining time is long enough.

        At best, the speed grows with the number of workers. The cost of the trial, there and back,
        must be small relative to the remaining time then.
        """
        workers = self.standing.present.workers
        probe = self.probes[-1]
        left_s = self.here.time_s.value
        if not self.job.compares and far.workers == workers:
            return self.stay("without gradient noise, batches cannot be compared")
        at_best_s = left_s * min(workers / far.workers, 1.0)
        costs_s = 2 * self.standing.switch_s + 0.5 * probe.steps * probe.step_s
        if costs_s > _MOST_OVERHEAD * at_best_s:
            return self.stay(
                f"{left_s:.0f} s are left, too little to try {far} (about {costs_s:.0f} s)"
            )
        why = "the other extreme predicts all configurations in between"
        return OnlineDecision(far, True, why, self.ranked)

    def rival(self) -> OnlineDecision:
        """Stay, unless an unmeasured configuration may be good enough to be worth a trial.

        The expected value of a trial is that of ``max(0, gain)``. It costs two switches, because
        training returns if it is no better, and the excess time of its steps.
        """
        stay = self.stay(f"{self.here.choice} is {self._best_in}")
        if self.job.objective is Objective.KNEE:
            return stay
        seen = {probe.choice for probe in self.probes if not probe.doubt}
        high = self._own(self.here).high
        for one in self.ranked[1:]:
            if one.choice in seen or self._own(one).low >= high:
                continue
            slower = max(one.time_s.value / self.here.time_s.value - 1, 0.0)
            looking_s = slower * self.probes[-1].steps * one.step_s.value
            looking_s += 2 * self.standing.switch_s
            if self._expected_gain(one) > self._cost(one, looking_s):
                return OnlineDecision(
                    one.choice,
                    True,
                    f"{one.choice} may be better than {self.here.choice}: their intervals overlap, "
                    "and enough training is left for a trial",
                    self.ranked,
                )
        return stay

    def pays(self, best: OnlineForecast) -> bool:
        """Return whether a switch costs less than it saves."""
        switch_s = self.standing.switch_s
        if self.job.objective is Objective.KNEE:
            return switch_s <= _SMALL * best.time_s.value
        of = "cost_usd" if self.job.objective is Objective.COST else "time_s"
        gain: float = getattr(self.here, of).value - getattr(best, of).value
        return gain > self._cost(best, switch_s)

    def _expected_gain(self, one: OnlineForecast) -> float:
        mine, theirs = self._own(one), self._own(self.here)
        if not isfinite(mine.value):
            return 0.0
        # Only below the expected value: how much worse it may be does not matter.
        apart = (mine.value - mine.low) / Z95
        gain = theirs.value - mine.value
        if apart <= 0:
            return max(gain, 0.0)
        normal = NormalDist()
        return gain * normal.cdf(gain / apart) + apart * normal.pdf(gain / apart)

    def _own(self, one: OnlineForecast) -> Interval:
        """Return the value with its error in comparison with others."""
        ends_s = (one.own_s.value, one.own_s.low, one.own_s.high)
        return Interval(*(self._cost(one, end_s) for end_s in ends_s))

    def _cost(self, to: OnlineForecast, time_s: float) -> float:
        """Return the cost of a time in a configuration, in units of the objective."""
        if self.job.objective is Objective.COST:
            return self.job.cost_usd(to.choice.workers, time_s)
        return time_s

    @property
    def _best_in(self) -> str:
        return {
            Objective.TIME: "the fastest",
            Objective.COST: "the cheapest",
            Objective.KNEE: "the knee of time and cost",
        }[self.job.objective]


def _ranked(found: Sequence[OnlineForecast], objective: Objective) -> tuple[OnlineForecast, ...]:
    """Return the configurations, the best first; of equals, the smaller."""
    by_time = sorted(found, key=lambda o: (o.time_s.value, o.cost_usd.value, o.choice))
    match objective:
        case Objective.COST:
            return tuple(sorted(found, key=lambda o: (o.cost_usd.value, o.time_s.value, o.choice)))
        case Objective.TIME:
            return tuple(sorted(found, key=lambda o: (o.time_s.value, o.choice)))
    best = frontier(by_time)
    if not best:
        return tuple(by_time)
    at = knee([o.time_s.value for o in best], [o.cost_usd.value for o in best])
    return (best[at], *(one for one in by_time if one != best[at]))


def whole_epochs(one: OnlineForecast) -> int:
    """Return the number of epochs of the whole training in a configuration, rounded up."""
    return ceil(one.epochs - 1e-6)


def must_restart(here: OnlineForecast, given: int, samples: int, switch_s: float) -> bool:
    """Return whether to restart the present configuration with the epochs that it needs.

    With too few epochs, the target would be missed, so it is restarted in any case. With too many,
    only if the excess takes longer than the switch.
    """
    more = whole_epochs(here) - given
    saved_s = -more * samples / here.choice.batch * here.step_s.value
    return more > 0 or saved_s > switch_s


def awaits_noise(noise: Noise | None, trained: float) -> bool:
    """Return whether a phase goes on only to measure the noise, after a fraction of the training.

    It does until the noise has settled. But noise may rise over the whole training, so the wait has
    a limit: then the noise counts with an interval that includes its change.
    """
    return noise is not None and noise.settled is False and trained < _MOST_WAIT


def with_gamma(
    trained: Sequence[MeasuredTraining], probes: Sequence[Probe]
) -> tuple[MeasuredTraining, ...]:
    """Return earlier trainings with the settled noise that was measured at their batches.

    With it, Scavenger's two constants are known, and its noise by batch.
    """
    found = list[MeasuredTraining]()
    for run in trained:
        own = surest([p.noise for p in probes if p.choice.batch == run.batch])
        known = run.gamma is None and own is not None and own.settled
        found.append(
            replace(run, gamma=gamma_of(own.scale, run.batch, PARTS)) if own and known else run
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Overhead:
    """The cost of finding the configuration."""

    search_s: float  # from the first step to the first one in the final configuration
    # Time of the chosen configuration for the samples trained meanwhile
    useful_s: float
    total_s: float  # of the whole training, search included

    @property
    def lost_s(self) -> float:
        """Seconds that training in the chosen configuration from the start would have saved."""
        return self.search_s - self.useful_s

    @property
    def part(self) -> float:
        """The same, as a fraction of the whole training."""
        return self.lost_s / self.total_s if self.total_s > 0 else 0.0


def overhead(search_s: float, samples: float, per_s: float, left_s: float) -> Overhead:
    """Return the cost of finding the configuration, switches included."""
    return Overhead(search_s, samples / per_s, search_s + left_s)
