"""Scavenger's search against an oracle: how much worse is the configuration that it chooses?

    python benchmarks/papers/search.py [--profiles FOLDER] [--json] [--draw SVG]

The jobs are those of `stored_models.py`: two nets in three widths. A configuration is a number of
equal workers and a global batch. The oracle chooses the best one by all measurements of the job.
Full, partial and no-search choose by forecasts that use fewer of them.

Measured are the epochs at four batches, and the steps of one worker at five sizes. Only
configurations whose shares lie between these sizes are compared. Communication is a forecast, by a
ring of 0.1 ms and 10 Gbit/s, and the same for all. No configuration of several workers was run.
The time of searching is not included (`benchmarks/online.py`).

Full search is fitted to the same measurements that judge it, so its error is an in-sample error.
The oracle interpolates between the measured sizes, while full search fits a line through them.
Partial search has the measurements of the smallest and the largest configuration. No-search has the
model of the most similar other job, or the average of all others.

The results go to `benchmarks/papers/results/search.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.forecast_judging import pick
from benchmarks.papers.cells import RESULTS

from evenstride._version import __version__
from evenstride.core.convergence.batch_laws import MeasuredTraining, fit_best
from evenstride.errors import ConfigError
from evenstride.planner.online_forecast import Configuration
from evenstride.planner.workload.model_reuse import completed
from evenstride.planner.workload.model_store import StoredModel, likeness, read_store
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import Model, Point, WorkloadProfile
from evenstride.report.plotting import repeatable, save
from evenstride.report.wording import Table
from evenstride.sim.engine.network import Ring

PROFILES, FILE = Path(__file__).parents[1] / "profiles", RESULTS / "search.json"
WORKERS, OBJECTIVES = (1, 2, 4, 8), ("time", "cost", "knee")
LATENCY_S, BYTES_PER_S = 1e-4, 1.25e9
SEARCHES = ("full", "partial", "similar job", "universal model")
Choices = Sequence[Configuration]


@dataclass(frozen=True, slots=True)
class SearchRow:
    """A choice by a search, and that of the oracle. Both are judged by all measurements."""

    job: str
    search: str
    objective: str
    chosen: str
    best: str
    time_above: float  # relative excess over the oracle's time
    cost_above: float
    error: float  # mean relative error of the forecast times of all configurations


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """Steps and trainings of a job, which have a file each in the store."""

    name: str
    steps: WorkloadProfile
    trainings: WorkloadProfile

    @property
    def points(self) -> tuple[Point, ...]:
        return self.steps.devices[0].points

    def possible(self) -> list[Configuration]:
        """Return the configurations whose shares are between the measured sizes."""
        sizes = [point.samples for point in self.points]
        batches = [one.batch for one in self.trainings.trainings]
        every = (Configuration(workers, batch) for workers in WORKERS for batch in batches)
        return [one for one in every if min(sizes) <= one.batch / one.workers <= max(sizes)]

    def times_s(self, choices: Choices, step: Any, epochs: Any) -> list[float]:
        """Return the training time in each configuration, by a worker's step and the epochs."""
        ring = Ring(LATENCY_S, BYTES_PER_S, self.steps.model.gradient_bytes)
        return [
            epochs(one.batch)
            * ceil(self.steps.samples / one.batch)
            * (step(one.batch / one.workers) + ring.all_reduce_s(one.workers))
            for one in choices
        ]

    def measured_s(self, choices: Choices) -> list[float]:
        """Return the times by all measurements, with steps interpolated between two sizes."""
        epochs = {one.batch: one.epochs for one in self.trainings.trainings}
        sizes, steps_s = zip(*sorted((p.samples, p.step_s) for p in self.points), strict=True)
        return self.times_s(choices, lambda b: np.interp(b, sizes, steps_s), epochs.__getitem__)

    def searched_s(self, choices: Choices, known: Choices) -> list[float]:
        """Return the forecast times if the steps and epochs of some configurations are known."""
        shares = {one.batch / one.workers for one in known}
        ends = min(shares), max(shares)
        points = [p for p in self.points if ends[0] <= p.samples <= ends[1]]
        if len(shares) == 2:  # the extremes alone, without the sizes between them
            points = [min(points, key=_size), max(points, key=_size)]
        batches = {one.batch for one in known}
        trained = [one for one in self.trainings.trainings if one.batch in batches]
        runs = [MeasuredTraining(one.batch, one.epochs) for one in trained]
        law = fit_best(runs)
        return self.times_s(choices, fitted(points).at, lambda b: law.epochs(b).value)

    def reused_s(self, choices: Choices, others: Sequence[StoredModel]) -> list[float]:
        """Return the forecast times with the models of other jobs, as `evenstride plan` does.

        The job knows its largest step, and the epochs at its second largest batch.
        """
        largest = self.steps.devices[0].model_copy(
            update={"points": (max(self.points, key=_size),)}
        )
        anchor = sorted(self.trainings.trainings, key=lambda one: one.batch)[-2]
        known = {"devices": (largest,), "global_batch": anchor.batch}
        found = completed(self.steps.model_copy(update=known), anchor.epochs, others).profile
        law = fit_best([MeasuredTraining(one.batch, one.epochs) for one in found.trainings])
        curve = fitted(found.devices[0].points)
        return self.times_s(choices, curve.at, lambda b: law.epochs(b).value)

    def unlike_all(self) -> MeasuredJob:
        """Return the job as one that is similar to no other, for which the average remains."""
        tiny = Model(parameters=1, gradient_bytes=self.steps.model.gradient_bytes)
        strange = self.steps.model_copy(update={"model": tiny, "script": ""})
        return MeasuredJob(self.name, strange, self.trainings)


def _size(point: Point) -> int:
    return point.samples


def jobs_of(models: Iterable[StoredModel]) -> list[MeasuredJob]:
    """Return the jobs that have both steps and trainings."""
    both: dict[str, dict[bool, WorkloadProfile]] = {}
    for one in models:
        both.setdefault(one.profile.script, {})[bool(one.profile.devices)] = one.profile
    return [
        MeasuredJob(script.partition(" ")[2], kinds[True], kinds[False])
        for script, kinds in sorted(both.items())
        if len(kinds) == 2
    ]


def forecasts(job: MeasuredJob, models: Sequence[StoredModel]) -> Mapping[str, list[float]]:
    """Return the forecast times of all configurations, by search."""
    choices = job.possible()
    others = [one for one in models if not likeness(job.steps, one.profile).same]
    times_s = (
        job.searched_s(choices, choices),
        job.searched_s(choices, (min(choices), max(choices))),
        job.reused_s(choices, others),
        job.unlike_all().reused_s(choices, others),
    )
    return dict(zip(SEARCHES, times_s, strict=True))


def rows_of(models: Sequence[StoredModel]) -> Iterator[SearchRow]:
    """Yield the choice of each search for each job and objective."""
    for job in jobs_of(models):
        choices = job.possible()
        real_s = job.measured_s(choices)
        costs = _costs(choices, real_s)
        for search, times_s in forecasts(job, models).items():
            error = mean(abs(t / s - 1) for t, s in zip(times_s, real_s, strict=True))
            for objective in OBJECTIVES:
                chosen = pick(objective, times_s, _costs(choices, times_s))
                best = pick(objective, real_s, costs)
                yield SearchRow(
                    job.name,
                    search,
                    objective,
                    str(choices[chosen]),
                    str(choices[best]),
                    real_s[chosen] / real_s[best] - 1,
                    costs[chosen] / costs[best] - 1,
                    error,
                )


def _costs(choices: Choices, times_s: Sequence[float]) -> list[float]:
    """Return the worker-seconds."""
    return [one.workers * time_s for one, time_s in zip(choices, times_s, strict=True)]


def stored() -> list[SearchRow]:
    """Return the stored results; an empty list without any."""
    return [SearchRow(**one) for one in json.loads(FILE.read_text())] if FILE.exists() else []


def table(rows: Sequence[SearchRow]) -> Table:
    """Return the means over the jobs: excess by objective, and the error of the forecasts."""
    cells = []
    for search in SEARCHES:
        own = [row for row in rows if row.search == search]
        by = {of: [row for row in own if row.objective == of] for of in OBJECTIVES}
        knee = f"{_mean(by['knee'], 'time_above')}, {_mean(by['knee'], 'cost_above')}"
        above = (_mean(by["time"], "time_above"), _mean(by["cost"], "cost_above"), knee)
        best = "/".join(str(sum(row.chosen == row.best for row in by[of])) for of in OBJECTIVES)
        error = f"{mean(row.error for row in own):.1%}"
        cells.append((search, *above, f"{best} of {len(by['time'])}", error))
    headings = ("search", "time", "cost", "knee: time, cost", "best chosen", "error of times")
    return Table(headings, tuple(cells))


def _mean(rows: Sequence[SearchRow], name: str) -> str:
    return f"{mean(getattr(row, name) for row in rows):+.1%}"


def draw(rows: Sequence[SearchRow], path: Path) -> None:
    """Draw the excess of each choice over the oracle's, in its objective's own quantity."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with repeatable(), rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        for axes, of in zip(figure.subplots(1, 2, sharey=True), OBJECTIVES, strict=False):
            for place, search in enumerate(SEARCHES):
                own = [row for row in rows if (row.search, row.objective) == (search, of)]
                above = [100 * getattr(row, f"{of}_above") for row in own]
                axes.barh(place, mean(above), color="#0072B2")
                axes.plot(above, [place] * len(above), "o", color="#D55E00", markersize=4)
            axes.set_yticks(range(len(SEARCHES)), SEARCHES)
            axes.set_xlabel(f"{of} above the oracle's in %: mean, and each job", fontsize=8)
        figure.axes[0].invert_yaxis()  # both panels share it
        save(figure, path, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute, store, show and draw. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of the jobs")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--draw", type=Path, help="SVG file to draw")
    args = parser.parse_args(arguments)
    try:
        # The versions of the measurements do not matter within one store.
        rows = list(rows_of(read_store(args.profiles, __version__, "", force=True).models))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if not rows:
        print(f"{args.profiles} has no job with steps and trainings", file=sys.stderr)
        return 2
    FILE.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(json.dumps([asdict(row) for row in rows]) if args.json else table(rows).text())
    if args.draw is not None:
        draw(rows, args.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
