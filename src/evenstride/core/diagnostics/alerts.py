"""Alerts about workers that are slower than they were, or that the run does not need.

Pure: a state and new measurements give the next state and the alerts. An alert is given once, when
a condition has lasted for a while (`DebouncedStates`), and again only after it had ended for a
while. A worker is slow relative to its own best speed, which `PeakSpeeds` tracks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.fleet import Fleet, as_array
from evenstride.core.formatting import time_text
from evenstride.core.policy import Situation
from evenstride.core.time_model.estimates import CurveEstimates, TimeModel
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import InfeasibleShares

# Both, because sixty steps of 2 ms take only 0.12 s.
WHILE_STEPS, WHILE_S = 60.0, 5.0
"""How long a condition must last: at least this many steps and this many seconds of them."""

USUAL_BELOW = 0.7
"""Fraction of its best speed below which a worker is reported."""
# A worker has recovered once it has regained at least this fraction of the lost speed.
_MADE_UP = 1.0 / 3.0
# A speed that has risen by this factor since it was found low contradicts the first estimate. The
# steps that looked like a change of speed may have been spikes, or later measurements at another
# share may have shown a wrong shape of the curve.
_CONTRADICTS = 1.25
# What an unneeded worker must gain to be needed again, as a fraction of its time.
_WORTH_AGAIN = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class WorkerArrays:
    """Arrays with an entry for each worker; zero means that nothing is known."""

    def of(self, places: IntArray) -> Self:
        """Return the rows for other workers, given their old places; -1 for new workers."""
        known = places >= 0
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {name: np.zeros(len(places), dtype=row.dtype) for name, row in rows.items()}
        for name, row in rows.items():
            taken[name][known] = row[places[known]]
        return type(self)(**taken)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Steps measured for each worker."""

    steps: FloatArray  # number of steps, ``(W,)``; 0 if none
    lasted_s: FloatArray  # their duration in seconds, waiting time included, ``(W,)``
    first: IntArray  # the first of them, ``(W,)``; only meaningful if there are steps

    @classmethod
    def none(cls, workers: int, first: int = 0) -> Span:
        return cls(np.zeros(workers), np.zeros(workers), np.full(workers, first))


@dataclass(frozen=True, slots=True, eq=False)
class DebouncedStates(WorkerArrays):
    """Whether each of ``W`` workers is in an episode: bad for a while, and not good since."""

    open: Mask  # whether an episode is open, bool ``(W,)``
    turning: Mask  # whether it was last bad, or good in an episode, bool ``(W,)``
    steps: FloatArray  # steps in this condition, ``(W,)``
    lasted_s: FloatArray  # their duration in seconds, ``(W,)``
    since: IntArray  # first step of the latest bad ones, ``(W,)``

    @classmethod
    def none(cls, workers: int) -> DebouncedStates:
        zero = np.zeros(workers)
        return cls(zero > 0, zero > 0, zero, zero, zero.astype(np.int64))

    def after(
        self, bad: Mask, good: Mask, seen: Span, fresh: Span, unsettled: Mask | None = None
    ) -> tuple[DebouncedStates, Mask]:
        """Return the episodes after one more exchange, and the workers for which one began.

        Between ``bad`` and ``good`` nothing changes. ``seen`` is what was measured since the
        previous exchange; a worker without measurements stays unchanged. ``fresh`` is the part of
        it that belongs to a new condition. For workers in ``unsettled``, the count restarts.
        """
        # Without measurements of a worker nothing about it changes.
        measured = seen.steps > 0
        holds = np.where(self.open, good, bad) & measured
        new = holds & ~self.turning & ~self.open
        goes_on = 1.0 if unsettled is None else ~unsettled
        # If the condition is new, only the part of the exchange after its onset counts.
        steps = goes_on * (self.steps + np.where(new, fresh.steps, seen.steps))
        lasted_s = goes_on * (self.lasted_s + np.where(new, fresh.lasted_s, seen.lasted_s))
        turned = holds & (steps >= WHILE_STEPS) & (lasted_s >= WHILE_S)
        # An episode that began or ended starts the next count at 0.
        counts = holds & ~turned
        after = DebouncedStates(
            self.open ^ turned,
            np.where(measured, counts, self.turning),
            np.where(measured, np.where(counts, steps, 0.0), self.steps),
            np.where(measured, np.where(counts, lasted_s, 0.0), self.lasted_s),
            np.where(new, fresh.first, self.since),
        )
        return after, turned & ~self.open


@dataclass(frozen=True, slots=True, eq=False)
class PeakSpeeds(WorkerArrays):
    """The best sustained speed of each of ``W`` workers.

    A speed is stored as the time of a share, so a better estimate of the curve's shape does not
    change it. The lowest speed of a window counts.
    """

    share: IntArray  # share of the best speed, ``(W,)``; 0 if not known yet.
    time_s: FloatArray  # its time, ``(W,)``.
    fixed_s: FloatArray  # of the curve as estimated then, ``(W,)``.
    per_sample_s: FloatArray  # the same, ``(W,)``.
    at: IntArray  # share of the current window, ``(W,)``; 0 if none is open.
    longest_s: FloatArray  # its longest time in this window, ``(W,)``.
    steps: FloatArray  # steps of this window so far, ``(W,)``.
    lasted_s: FloatArray  # their duration in seconds, ``(W,)``.

    @classmethod
    def none(cls, workers: int) -> PeakSpeeds:
        zero, no_share = np.zeros(workers), np.zeros(workers, dtype=np.int64)
        return cls(no_share, zero, zero, zero, no_share, zero, zero, zero)

    def after(self, now: CurveEstimates, shares: IntArray, seen: Span) -> PeakSpeeds:
        measured = seen.steps > 0
        begins = measured & (self.at == 0)
        at = np.where(begins, shares, self.at)
        time_s = now.time_s(at)
        longest_s = np.where(measured, np.maximum(self.longest_s, time_s), self.longest_s)
        # Steps before the first exchange of a window may have had another speed.
        goes_on = measured & ~begins
        steps = self.steps + np.where(goes_on, seen.steps, 0.0)
        lasted_s = self.lasted_s + np.where(goes_on, seen.lasted_s, 0.0)
        whole = goes_on & (steps >= WHILE_STEPS) & (lasted_s >= WHILE_S)
        # Below 1 if part of the window was slower, so one quick exchange is not a best speed.
        kept = np.divide(time_s, longest_s, out=np.zeros_like(time_s), where=whole)
        kept_at_least = np.where(whole, kept, 1.0)
        better = whole & ~(self.speed(now) * kept <= 1.0)  # includes the first, which is NaN
        return PeakSpeeds(
            np.where(better, at, self.share),
            np.where(better, longest_s, self.time_s),
            np.where(better, now.fixed_s / kept_at_least, self.fixed_s),
            np.where(better, now.per_sample_s / kept_at_least, self.per_sample_s),
            np.where(whole, shares, at),
            np.where(whole, now.time_s(shares), longest_s),
            np.where(whole, 0.0, steps),
            np.where(whole, 0.0, lasted_s),
        )

    def speed(self, now: CurveEstimates) -> FloatArray:
        """Return each worker's speed as a fraction of its best, ``(W,)``; NaN if not known."""
        unknown = np.full(len(self.share), np.nan)
        return np.asarray(
            np.divide(self.time_s, now.time_s(self.share), out=unknown, where=self.share > 0)
        )

    def speed_at(self, shares: IntArray, now: CurveEstimates) -> FloatArray:
        """Return the same with the curves as estimated at the best speed, ``(W,)``.

        It differs from `speed` if the estimated shape of a curve has changed since.
        """
        unknown = np.full(len(self.share), np.nan)
        then_s = self.fixed_s + self.per_sample_s * shares
        return np.asarray(np.divide(then_s, now.time_s(shares), out=unknown, where=self.share > 0))


@dataclass(frozen=True, slots=True)
class Alert:
    """One worker to report, with the evidence."""

    # ``slow`` (it stays below a fraction of its best speed) or ``unneeded`` (the others alone would
    # be at least as fast).
    kind: Literal["slow", "unneeded"]
    worker: str  # its name.
    step: int  # committed steps at the time of the alert.
    since: int  # first slow step; or the step at which the worker was first unneeded.
    share: int  # samples of the worker, to which both times refer.
    # Time of these samples at its best speed; for an unneeded worker, time of a step without it, in
    # seconds.
    better_s: float
    now_s: float  # time of these samples now; for an unneeded worker, of a step with it
    # A slow worker's speed as a fraction of its best; ``None`` for an unneeded one.
    speed: float | None = None
    # Seconds by which it lengthens every step; ``None`` if workers do not wait for each other.
    costs_s: float | None = None
    costs_part: float | None = None  # the same as a fraction of the step
    others: int = 0  # number of other unneeded workers, excluded from the comparison

    @property
    def reason(self) -> str:
        """The alert with its evidence, as one sentence."""
        since = f"since step {self.since}"
        better, now = time_text(self.better_s), time_text(self.now_s)
        longer = f"{time_text(self.costs_s or 0.0)} ({self.costs_part or 0.0:.0%})"
        if self.kind == "slow":
            costs = "" if self.costs_s is None else f"; this makes each step {longer} longer"
            return (
                f"worker {self.worker} runs at {self.speed:.2f} of its best speed {since}: "
                f"{self.share} samples took {better}, now {now}{costs}"
            )
        others = f" and {self.others} more" if self.others else ""
        return (
            f"worker {self.worker} is not needed {since}: by the fitted curves a step takes {now} "
            f"with it{others}, and would take {better} without, {longer} less"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the alert as JSON types; ``alert`` is its kind."""
        plain = asdict(self)
        return {"alert": plain.pop("kind"), **plain, "reason": self.reason}


@dataclass(frozen=True, slots=True, eq=False)
class Alerts:
    """The state of the alerts for the workers of a fleet."""

    # Fraction of its best speed below which a worker is slow, from 0 (never) up to 1.
    below: float = USUAL_BELOW
    names: tuple[str, ...] = ()  # of the workers, in the fleet's order
    pasts: PeakSpeeds = field(default_factory=lambda: PeakSpeeds.none(0))  # their best speeds
    # Their relative speeds when the current low phase began, ``(W,)``.
    found: FloatArray = field(default_factory=lambda: np.zeros(0))
    # Workers for which that has been contradicted since, bool ``(W,)``.
    doubtful: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    slow: DebouncedStates = field(default_factory=lambda: DebouncedStates.none(0))
    # Workers that are not needed.
    spare: DebouncedStates = field(default_factory=lambda: DebouncedStates.none(0))

    def after(
        self, situation: Situation, *, lockstep: bool = True
    ) -> tuple[Alerts, tuple[Alert, ...]]:
        """Return the state after an exchange, and the alerts of that exchange.

        ``lockstep`` says whether workers wait for each other in every step. If they do not, no
        worker slows the others. Cost: ``O(W)`` vectorised, plus a search for the best split per
        alert.
        """
        fleet, estimate, reports = situation.fleet, situation.estimate, situation.observations
        at = self._of(tuple(worker.name for worker in fleet.workers))
        usable = reports.modelled & (reports.share > 0) & (reports.share <= fleet.global_batch)
        seen = reports.only(usable & (reports.worker >= 0) & (reports.worker < len(fleet)))
        if not len(seen):
            return at, ()
        look = _Look.of(seen, estimate.now, as_array(situation.shares))
        pasts = at.pasts.after(estimate.now, look.shares, look.span)
        after, slower = replace(at, pasts=pasts)._slowness(look)
        found = [after._slow_alert(k, situation, look) for k in np.flatnonzero(slower).tolist()]
        # If workers do not wait for each other, a slow one costs the others nothing.
        if not (lockstep and estimate.known):
            return after, tuple(replace(alert, costs_s=None, costs_part=None) for alert in found)
        spare, spares = at._spares(situation, look)
        found += filter(
            None, (_spare_alert(k, situation, spare) for k in np.flatnonzero(spares).tolist())
        )
        return replace(after, spare=spare), tuple(found)

    def speeds(self, now: CurveEstimates) -> FloatArray:
        """Return each worker's speed as a fraction of its best, ``(W,)``; NaN if not known yet."""
        return self.pasts.speed(now)

    def _of(self, names: tuple[str, ...]) -> Alerts:
        if names == self.names:
            return self
        places = {name: place for place, name in enumerate(self.names)}
        at = np.array([places.get(name, -1) for name in names], dtype=np.int64)
        # A new worker takes the last place, which is empty.
        found, doubtful = (np.append(row, 0.0)[at] for row in (self.found, self.doubtful))
        pasts, slow, spare = self.pasts.of(at), self.slow.of(at), self.spare.of(at)
        return Alerts(self.below, names, pasts, found, doubtful > 0, slow, spare)

    def _slowness(self, look: _Look) -> tuple[Alerts, Mask]:
        speed, doubt = _beside_the_others(self.pasts.speed(look.now)), look.doubt(self.pasts)
        # Well above the threshold, or noise near it would end an alert and give it again.
        recovered = self.below + _MADE_UP * (1.0 - self.below)
        with np.errstate(invalid="ignore"):  # an unknown speed is neither
            # An uncertain curve may be wrong by its uncertainty, which must not name a worker.
            bad = speed * (1.0 + doubt) < self.below
            good = speed >= recovered
            watched = self.slow.turning & ~self.slow.open
            # Only before the worker is reported: later, a rising speed is a recovery.
            contradicted = bad & watched & (speed > _CONTRADICTS * self.found)
            doubtful = (self.doubtful | contradicted) & bad
            # If in doubt, the curve from the time of its best speed must also show it as slow.
            bad &= ~doubtful | (self.pasts.speed_at(look.shares, look.now) < self.below)
        run = look.slow_run(speed, recovered)
        slow, slower = self.slow.after(bad, good, look.span, run, contradicted)
        found = np.where(~self.slow.turning | contradicted, speed, self.found)
        return replace(self, slow=slow, found=found, doubtful=doubtful), slower

    def _spares(self, situation: Situation, look: _Look) -> tuple[DebouncedStates, Mask]:
        times, fleet, step = situation.estimate.model, situation.fleet, situation.step
        doubt = situation.estimate.relative_std(np.maximum(fleet.lower, 1))
        # Each as fast as its uncertainty allows, so that uncertainty alone names no worker.
        bad = unneeded(times, fleet, np.maximum(1.0 - doubt, 0.0))
        nearly = bad
        if self.spare.open.any():  # only a reported worker can become needed again
            nearly = bad | unneeded(times, fleet, np.full(len(fleet), 1.0 + _WORTH_AGAIN))
        return self.spare.after(bad, ~nearly, look.of_all(step), Span.none(len(fleet), step))

    def _slow_alert(self, k: int, situation: Situation, look: _Look) -> Alert:
        share, speed = int(look.shares[k]), float(_beside_the_others(self.speeds(look.now))[k])
        now_s = float(look.now.time_s(look.shares)[k])
        costs_s, part = _costs(k, situation, speed)
        return Alert(
            kind="slow",
            worker=self.names[k],
            step=situation.step,
            since=int(self.slow.since[k]),
            share=share,
            better_s=now_s * speed,
            now_s=now_s,
            speed=speed,
            costs_s=costs_s,
            costs_part=part,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """One exchange: its observations, and their totals per worker."""

    seen: Measurements
    now: CurveEstimates
    shares: IntArray
    span: Span
    lasted_s: FloatArray  # of each observation

    @classmethod
    def of(cls, seen: Measurements, now: CurveEstimates, shares: IntArray) -> _Look:
        owner = np.repeat(np.arange(len(seen)), seen.steps)
        lasted_s = _sums(owner, seen.busy_s + seen.wait_s, len(seen))
        latest = np.lexsort((seen.first_step, seen.worker))
        measured = shares.copy()
        measured[seen.worker[latest]] = seen.share[latest]  # the last of each stays
        everything = np.ones(len(seen), dtype=np.bool_)
        return cls(seen, now, measured, _span(seen, lasted_s, everything, len(shares)), lasted_s)

    def doubt(self, pasts: PeakSpeeds) -> FloatArray:
        return self.now.relative_std(pasts.share)

    def slow_run(self, speed: FloatArray, limit: float) -> Span:
        """Return for each worker the steps since which all its measurements were slow."""
        seen, worker = self.seen, self.seen.worker
        # Time of the same shares at the worker's best speed.
        healthy_s = self.now.of(worker).time_s(seen.share) * np.nan_to_num(speed)[worker]
        slow = healthy_s < limit * seen.median_s
        fast_until = np.full(len(self.shares), -1)
        np.maximum.at(fast_until, worker[~slow], seen.first_step[~slow])
        run = _span(seen, self.lasted_s, slow & (seen.first_step > fast_until[worker]), len(speed))
        # If the latest measurement was quick, whatever the curve says, it is slow from then on.
        until = np.zeros(len(speed), dtype=np.int64)
        np.maximum.at(until, worker, seen.first_step + seen.steps)
        return replace(run, first=np.where(run.steps > 0, run.first, until))

    def of_all(self, step: int) -> Span:
        """Return the longest measured span for every worker, for conditions that concern all."""
        none = Span.none(len(self.shares), step)
        span = self.span
        return Span(none.steps + span.steps.max(), none.steps + span.lasted_s.max(), none.first)


def _span(seen: Measurements, lasted_s: FloatArray, which: Mask, workers: int) -> Span:
    worker, first = seen.worker[which], np.full(workers, np.iinfo(np.int64).max)
    np.minimum.at(first, worker, seen.first_step[which])
    return Span(
        _sums(worker, seen.steps[which], workers),
        _sums(worker, lasted_s[which], workers),
        first,
    )


def _sums(owner: IntArray, values: FloatArray | IntArray, owners: int) -> FloatArray:
    return np.asarray(np.bincount(owner, values, owners), dtype=np.float64)


def _beside_the_others(speed: FloatArray) -> FloatArray:
    """Return speeds relative to the best one: a slow-down of all workers is caused by the work."""
    if len(speed) < 2 or np.isnan(speed).any():
        return speed
    # At most 1: a worker above its own best does not make the others slow.
    return speed / min(float(speed.max()), 1.0)


def _costs(k: int, situation: Situation, speed: float) -> tuple[float | None, float | None]:
    """Return by how much a slow worker lengthens a step, in seconds and as a fraction of it."""
    # Either the split in force stays, or the best split with and without the slow-down is compared:
    # the larger cost counts.
    fleet, estimate = situation.fleet, situation.estimate
    times, shares = estimate.model, as_array(situation.shares)
    if not estimate.known_at(shares):
        return None, None
    factor = np.ones(len(fleet))
    # Both parts of the time, because a change of speed scales the whole curve.
    factor[k] = speed
    healthy = TimeModel.affine(times.fixed_s * factor, times.per_sample_s * factor)
    now_s = in_force_s(times, shares)
    costs_s = now_s - in_force_s(healthy, shares)
    best, better = best_s(times, fleet), best_s(healthy, fleet)
    if estimate.known and best is not None and better is not None:
        costs_s = max(costs_s, best - better)
    return costs_s, costs_s / (now_s + situation.communication_s)


def _spare_alert(k: int, situation: Situation, spare: DebouncedStates) -> Alert | None:
    """Return the alert of an unneeded worker; ``None`` if the others have no split."""
    fleet, estimate = situation.fleet, situation.estimate
    shares, shared_s = as_array(situation.shares), situation.communication_s
    without = best_s(estimate.model, fleet, without=spare.open)
    if without is None:
        return None
    with_s = in_force_s(estimate.model, shares) + shared_s
    costs_s = max(with_s - without - shared_s, 0.0)
    return Alert(
        kind="unneeded",
        worker=fleet.workers[k].name,
        step=situation.step,
        since=int(spare.since[k]),
        share=int(shares[k]),
        better_s=without + shared_s,
        now_s=with_s,
        costs_s=costs_s,
        costs_part=costs_s / with_s,
        others=int(spare.open.sum()) - 1,
    )


def unneeded(times: TimeModel, fleet: Fleet, sure: FloatArray) -> Mask:
    """Return which workers are not needed, bool ``(W,)``.

    The best split of all ends no earlier than the worker that takes longest for its smallest
    share. If the others can do the whole batch by then, they alone are as fast. If several
    workers qualify, the slowest is removed first, and the next is evaluated without it: ``O(W)``
    for each. ``sure`` is the fraction of each worker's time that is certain, ``(W,)``; a value
    above 1 adds a margin.
    """
    least_s = times.at(fleet.lower) * sure
    out = np.zeros(len(fleet), dtype=np.bool_)
    # Never the fastest, because one worker has to train the batch.
    for worker in np.argsort(-least_s, kind="stable")[:-1].tolist():
        out[worker] = True
        if not _could_do_without(out, times, fleet, float(least_s[worker])):
            # A faster one leaves the others even less time, so the search is over.
            out[worker] = False
            break
    return out


def _could_do_without(out: Mask, times: TimeModel, fleet: Fleet, by_s: float) -> bool:
    parts = (by_s * times.speed - times.fixed_s) / times.per_sample_s
    if float(np.where(out, 0.0, np.maximum(parts, 0.0)).sum()) < fleet.global_batch:
        return False  # the usual case, and a faster check than in samples
    # In whole micro-batches, which the check above ignores.
    room = np.minimum(times.capacity(by_s), fleet.upper) // fleet.quanta * fleet.quanta
    return int(np.where(out, 0, room).sum()) >= fleet.global_batch


def best_s(times: TimeModel, fleet: Fleet, without: Mask | None = None) -> float | None:
    lower, upper = fleet.lower, fleet.upper
    if without is not None:
        lower, upper = np.where(without, 0, lower), np.where(without, 0, upper)
    try:
        shares = equal_finish(times, lower, upper, fleet.global_batch, quantum=fleet.quanta)
    except InfeasibleShares:
        return None
    return in_force_s(times, shares)


def in_force_s(times: TimeModel, shares: IntArray) -> float:
    """Return the time in seconds of the slowest worker that has samples."""
    return float(np.where(shares > 0, times.at(shares), 0.0).max())
