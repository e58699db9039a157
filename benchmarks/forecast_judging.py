"""Forecasts of the planner for each measurement of `forecast.py`, from the other measurements."""

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

_PARTS = 8  # of the gain; the law is the same for any number

Run = Mapping[str, Any]
"""Measurements of one mix of workers, as reported by `forecast_ranks.py`."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The mean step of one mix of workers at one batch, measured and forecast.

    Args:
        workload: Name of the workload.
        workers: Number of workers.
        hosts: Whether each worker has its own host with a slow link.
        batch: Global batch in samples.
        real_s: Mean measured step in seconds.
        forecast_s: Mean step forecast from the calibrations around each block, and from links
            measured with other numbers of workers.
        usd_per_h: Price of all workers.
    """

    workload: str
    workers: int
    hosts: bool
    batch: int
    real_s: float
    forecast_s: float
    usd_per_h: float

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.forecast_s / self.real_s - 1.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A whole training of one mix at one batch: measured, forecast, and by the baseline.

    Args:
        step: Its mean step.
        steps_each: Steps per epoch.
        real_epochs: Mean measured epochs over all seeds.
        forecast_epochs: Epochs by the law fitted to other batches.
        plain_epochs: Epochs interpolated between the other batches, without gradients.
    """

    step: Stepped
    steps_each: int
    real_epochs: float
    forecast_epochs: Interval
    plain_epochs: float

    @property
    def real_s(self) -> float:
        """Measured seconds."""
        return self.real_epochs * self.steps_each * self.step.real_s

    @property
    def forecast_s(self) -> float:
        """Forecast seconds."""
        return self.forecast_epochs.value * self.steps_each * self.step.forecast_s

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.forecast_s / self.real_s - 1.0

    @property
    def plain_error(self) -> float:
        """Relative error of the baseline, which uses the same forecast of the step."""
        return self.plain_epochs / self.real_epochs * self.step.forecast_s / self.step.real_s - 1.0


def stepped(runs: Sequence[Run]) -> list[Stepped]:
    """Return every mix at every batch, with links forecast from the other mixes of its kind."""
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
    """Return a ring fitted to the communication times of other numbers of workers."""
    found = links(measured, run["gradient_bytes"])
    if found is None:
        return Ring(0.0, inf, run["gradient_bytes"])  # a single worker waits for no other
    return Ring(found.latency_s, found.bytes_per_s or inf, run["gradient_bytes"])


def communication_s(run: Run) -> float:
    """Return the mean time of steps beyond the busy time of the last worker, over all batches.

    Weights are the inverse squares of the step times, because their errors are proportional.
    """
    alone = Ring(0.0, inf, 0.0)
    rows = [_at(run, number, alone) for number in range(len(run["batches"]))]
    weights = np.array([row.real_s**-2 for row in rows])
    beyond_s = np.array([row.real_s - row.forecast_s for row in rows])
    return max(float(weights @ beyond_s / weights.sum()), 0.0)


def _at(run: Run, number: int, ring: Ring) -> Stepped:
    """Return the mean step of a batch; each block is forecast from the calibrations around it."""
    real_s, forecast_s = [], []
    batch = run["batches"][number]
    for block in range(number, len(run["blocks"]), len(run["batches"])):
        before = block // run["blocks_between"]
        around = run["calibrations"][before : before + 2]
        fleet = [Workers(fitted(points(around, k)), 1) for k in range(run["workers"])]
        real_s.append(float(np.mean(run["blocks"][block]["steps_s"])))
        forecast_s.append(exact_step(fleet, batch, ring).time_s)
    return Stepped(
        run["workload"],
        run["workers"],
        run["hosts"],
        batch,
        float(np.mean(real_s)),
        float(np.mean(forecast_s)),
        sum(run["usd_per_h"]),
    )


def points(calibrations: Sequence[Run], worker: int) -> list[Point]:
    """Return the mean steps of a worker by size, over some calibrations."""
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
    """Return the relative scatter of steps.

    It is the median difference of successive steps. So drift of the machine does not count as
    noise, nor do rare outliers, which are in the mean already.
    """
    apart = np.concatenate([np.abs(np.diff(one)) / np.mean(one) for one in steps_s])
    # For normal values, the median difference is 0.6745 times sqrt(2) standard deviations.
    return min(float(np.median(apart)) / (0.6745 * 2**0.5), 1.0)


def trained(trainings: Sequence[Run]) -> list[MeasuredTraining]:
    """Return the trainings that reached the target, in the form that the laws expect."""
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
    """Yield the time of every training except those at the smallest and the largest batch."""
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
    """Interpolate epochs linearly between the smallest and the largest batch."""
    ends = min(epochs), max(epochs)
    return float(np.interp(batch, ends, [epochs[end] for end in ends]))


@dataclass(frozen=True, slots=True)
class Picked:
    """A configuration chosen by forecasts, compared with the best one by measurements.

    Args:
        workload: Name of the workload.
        objective: ``time``, ``cost`` or ``knee``.
        chosen: Workers and batch of the chosen configuration.
        best: Workers and batch of the best configuration.
        time_above: Relative excess of the chosen time over the best one.
        cost_above: Relative excess of the cost.
        time_ratio: Median time of all configurations divided by the chosen one.
        cost_ratio: The same for costs.
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
        rows: Steps of the workload, without hosts.
        trainings: Trainings of the workload.
        known: Batches whose trainings the planner may use. It forecasts the others.
        samples: Samples per epoch.
    """
    runs = trained(trainings)
    real = mean_epochs(runs)
    law = fit_best([run for run in runs if run.batch in known])
    steps = [-(-samples // row.batch) for row in rows]
    real_s = [real[row.batch] * n * row.real_s for row, n in zip(rows, steps, strict=True)]
    forecast_s = [
        law.epochs(row.batch).value * n * row.forecast_s for row, n in zip(rows, steps, strict=True)
    ]
    per_s = [row.usd_per_h / 3600 for row in rows]
    real_usd, forecast_usd = (
        [t * p for t, p in zip(one, per_s, strict=True)] for one in (real_s, forecast_s)
    )
    for objective in ("time", "cost", "knee"):
        chosen, best = pick(objective, forecast_s, forecast_usd), pick(objective, real_s, real_usd)
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
    """Return the index of the best configuration. The knee is that of the Pareto front."""
    if objective != "knee":
        return int(np.argmin(times_s if objective == "time" else usd))
    best = list[int]()
    for at in sorted(range(len(times_s)), key=lambda at: (times_s[at], usd[at])):
        if not best or usd[at] < usd[best[-1]]:
            best.append(at)
    return best[knee([times_s[at] for at in best], [usd[at] for at in best])]
