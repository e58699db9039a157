"""What `forecast.py` has measured, beside what the planner makes of the rest of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from evenstride.core.convergence.batch_laws import MeasuredTraining, fit_best, gamma_of
from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.search.selection import knee
from evenstride.planner.workload.step_time import Workers, exact_step, fitted, links
from evenstride.planner.workload.workload_profile import Point
from evenstride.sim.engine.network import Ring

_PARTS = 8  # of the gain; the law is the same with any

Run = Mapping[str, Any]
"""What the workers of one mix of speeds have measured, as `forecast_ranks.py` reports it."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One mix of workers at one batch: the mean step, real and forecast.

    Args:
        workload: what is trained.
        workers: how many.
        hosts: whether each has a host of its own, with a slow link.
        batch: global batch in samples.
        real_s: mean step in seconds.
        told_s: as forecast from the calibrations around each block, and links measured with other
            numbers of workers.
        usd_per_h: of all workers.
    """

    workload: str
    workers: int
    hosts: bool
    batch: int
    real_s: float
    told_s: float
    usd_per_h: float

    @property
    def error(self) -> float:
        """By which part the forecast is off."""
        return self.told_s / self.real_s - 1.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A whole training of one mix at one batch: real, forecast, and by the baseline.

    Args:
        step: of it.
        steps_each: of an epoch.
        real_epochs: mean of all seeds.
        told_epochs: of the law fitted to other batches.
        plain_epochs: interpolated between the batches beside it, without gradients.
    """

    step: Stepped
    steps_each: int
    real_epochs: float
    told_epochs: Interval
    plain_epochs: float

    @property
    def real_s(self) -> float:
        """Seconds that it takes."""
        return self.real_epochs * self.steps_each * self.step.real_s

    @property
    def told_s(self) -> float:
        """Seconds as forecast."""
        return self.told_epochs.value * self.steps_each * self.step.told_s

    @property
    def error(self) -> float:
        """By which part the forecast is off."""
        return self.told_s / self.real_s - 1.0

    @property
    def plain_error(self) -> float:
        """By which part the baseline is off, whose steps are forecast alike."""
        return self.plain_epochs / self.real_epochs * self.step.told_s / self.step.real_s - 1.0


def stepped(runs: Sequence[Run]) -> list[Stepped]:
    """Return every mix at every batch, links forecast from the other mixes of its kind."""
    rows = []
    for run in runs:
        others = [
            (one["workers"], communication_s(one))
            for one in runs
            if one["hosts"] == run["hosts"] and one["workers"] != run["workers"]
        ]
        ring = ring_of(others, run)
        rows += [_at(run, number, ring) for number in range(len(run["batches"]))]
    return rows


def ring_of(measured: Sequence[tuple[int, float]], run: Run) -> Ring:
    """Return the ring that communication with other numbers of workers means."""
    found = links(measured, run["gradient_bytes"])
    if found is None:
        return Ring(0.0, inf, run["gradient_bytes"])  # of one worker, that waits for none
    return Ring(found.latency_s, found.bytes_per_s or inf, run["gradient_bytes"])


def communication_s(run: Run) -> float:
    """Return what steps took beyond the last worker's own part: a mean over all batches.

    Weighted by the inverse of their steps' squares, as the errors of steps are in proportion.
    """
    alone = Ring(0.0, inf, 0.0)
    rows = [_at(run, number, alone) for number in range(len(run["batches"]))]
    weights = np.array([row.real_s**-2 for row in rows])
    beyond_s = np.array([row.real_s - row.told_s for row in rows])
    return max(float(weights @ beyond_s / weights.sum()), 0.0)


def _at(run: Run, number: int, ring: Ring) -> Stepped:
    """Return a batch's mean step over its blocks, each forecast from the calibrations around it."""
    real_s, told_s = [], []
    batch = run["batches"][number]
    for block in range(number, len(run["blocks"]), len(run["batches"])):
        before = block // run["blocks_between"]
        around = run["calibrations"][before : before + 2]
        fleet = [Workers(fitted(points(around, k)), 1) for k in range(run["workers"])]
        real_s.append(float(np.mean(run["blocks"][block]["steps_s"])))
        told_s.append(exact_step(fleet, batch, ring).time_s)
    return Stepped(
        run["workload"],
        run["workers"],
        run["hosts"],
        batch,
        float(np.mean(real_s)),
        float(np.mean(told_s)),
        sum(run["usd_per_h"]),
    )


def points(calibrations: Sequence[Run], worker: int) -> list[Point]:
    """Return a worker's steps by size, each the mean over some calibrations."""
    both = [dict(map(tuple, one["steps_s"][worker])) for one in calibrations]
    return [
        Point(
            samples=size,
            step_s=float(np.mean([np.mean(one[size]) for one in both])),
            scatter=scatter([one[size] for one in both]),
            steps=sum(len(one[size]) for one in both),
        )
        for size in both[0]
    ]


def scatter(steps_s: Sequence[Sequence[float]]) -> float:
    """Return by which part steps differ from one to the next, as a machine that wanders is not
    noise, and by the median, as what happens seldom is in the mean already."""
    apart = np.concatenate([np.abs(np.diff(one)) / np.mean(one) for one in steps_s])
    # Of normal values, the median of the differences is 0.6745 times sqrt(2) deviations.
    return min(float(np.median(apart)) / (0.6745 * 2**0.5), 1.0)


def trained(trainings: Sequence[Run]) -> list[MeasuredTraining]:
    """Return trainings as the laws take them; those that did not reach the target are left out."""
    return [
        MeasuredTraining(
            one["batch"],
            one["epochs"],
            None if one["noise"] is None else gamma_of(one["noise"], one["batch"], _PARTS),
        )
        for one in trainings
        if one["epochs"] is not None
    ]


def timed(
    rows: Sequence[Stepped], trainings: Mapping[str, Sequence[Run]], samples: int
) -> Iterator[Timed]:
    """Yield the time of every training whose batch can be left out: all but the ends."""
    for row in rows:
        runs = trained(trainings[row.workload])
        others = [run for run in runs if run.batch != row.batch]
        if not min(o.batch for o in others) < row.batch < max(o.batch for o in others):
            continue
        yield Timed(
            row,
            -(-samples // row.batch),
            mean_epochs(runs)[row.batch],
            fit_best(others).epochs(row.batch),
            interpolated(mean_epochs(others), row.batch),
        )


def mean_epochs(runs: Sequence[MeasuredTraining]) -> dict[int, float]:
    """Return the mean epochs at each batch."""
    return {
        batch: float(np.mean([run.epochs for run in runs if run.batch == batch]))
        for batch in sorted({run.batch for run in runs})
    }


def interpolated(epochs: Mapping[int, float], batch: int) -> float:
    """Return the epochs between the smallest and the largest batch, on a line."""
    ends = min(epochs), max(epochs)
    return float(np.interp(batch, ends, [epochs[end] for end in ends]))


@dataclass(frozen=True, slots=True)
class Picked:
    """A configuration that was chosen by forecasts, beside the best by measurements.

    Args:
        workload: what is trained.
        objective: ``time``, ``cost`` or ``knee``.
        chosen: workers and batch.
        best: likewise.
        time_above: by which part the chosen one takes longer than the best one.
        cost_above: by which part it costs more.
        time_ratio: median time of all configurations over that of the chosen one.
        cost_ratio: the same of costs.
    """

    workload: str
    objective: str
    chosen: tuple[int, int]
    best: tuple[int, int]
    time_above: float
    cost_above: float
    time_ratio: float
    cost_ratio: float


def picked(
    rows: Sequence[Stepped], trainings: Sequence[Run], known: Sequence[int], samples: int
) -> Iterator[Picked]:
    """Yield the choice for each objective, among all mixes and batches of one workload.

    Args:
        rows: of the workload, without hosts.
        trainings: of it.
        known: batches whose trainings the planner knows; those at the others it has to forecast.
        samples: of an epoch.
    """
    runs = trained(trainings)
    real = mean_epochs(runs)
    law = fit_best([run for run in runs if run.batch in known])
    steps = [-(-samples // row.batch) for row in rows]
    real_s = [real[row.batch] * n * row.real_s for row, n in zip(rows, steps, strict=True)]
    told_s = [
        law.epochs(row.batch).value * n * row.told_s for row, n in zip(rows, steps, strict=True)
    ]
    per_s = [row.usd_per_h / 3600 for row in rows]
    real_usd, told_usd = (
        [t * p for t, p in zip(one, per_s, strict=True)] for one in (real_s, told_s)
    )
    for objective in ("time", "cost", "knee"):
        chosen, best = pick(objective, told_s, told_usd), pick(objective, real_s, real_usd)
        yield Picked(
            rows[0].workload,
            objective,
            (rows[chosen].workers, rows[chosen].batch),
            (rows[best].workers, rows[best].batch),
            real_s[chosen] / real_s[best] - 1.0,
            real_usd[chosen] / real_usd[best] - 1.0,
            float(np.median(real_s)) / real_s[chosen],
            float(np.median(real_usd)) / real_usd[chosen],
        )


def pick(objective: str, times_s: Sequence[float], usd: Sequence[float]) -> int:
    """Return which configuration is best; the knee is that of those that no other beats."""
    if objective != "knee":
        return int(np.argmin(times_s if objective == "time" else usd))
    best = list[int]()
    for at in sorted(range(len(times_s)), key=lambda at: (times_s[at], usd[at])):
        if not best or usd[at] < usd[best[-1]]:
            best.append(at)
    return best[knee([times_s[at] for at in best], [usd[at] for at in best])]
