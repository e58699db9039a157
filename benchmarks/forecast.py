"""Compare forecasts of training times by the planner with measurements.

    python benchmarks/forecast.py --data ../data [--runs runs/forecast] [--only images:4 ...]

Two workloads (`forecast_work.py`) are trained to a loss on held-out data, at six batches with six
seeds each. This gives the epochs. Then 1, 2, 4 and 8 real, throttled workers of unequal speeds
train some steps at each batch. This gives the step time. A training takes the product of both,
because its trajectory does not depend on the number of workers. Some mixes also run on separate
hosts, which are network namespaces with slow links.

The time of each training is forecast from other measurements only:

- Epochs follow from the trainings at the *other* batches, by the law that fits them.
- The step of a worker follows from calibrations around each block of steps, at sizes that no batch
  gives it.
- Communication time follows from mixes with *other* numbers of workers, as the part of their steps
  beyond the calibrated time. A single all-reduce would not show that throttled workers answer late.

The baseline uses the same step times, but interpolates epochs linearly between the smallest and the
largest batch, without gradients. Every run is stored as JSON in a folder and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forecast_judging import Run, Stepped, Timed, picked, stepped, timed, trained
from benchmarks.forecast_work import SAMPLES
from benchmarks.network_namespaces import INTERFACE, cannot_have_hosts, hosts

from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, run
from evenstride.report.wording import Table

BATCHES = (64, 112, 192, 336, 576, 1024)
KNOWN = ((64, 192, 1024), BATCHES)  # batches whose trainings a choice may use: few, and all
SEEDS = tuple(range(6))
TARGETS = {"images": 0.55, "text": 2.45}
MOST_EPOCHS = 40
ROUNDS, STEPS, COLD_STEPS = 5, 8, 12
BLOCKS_BETWEEN = 2  # calibrations
SIZES_OF = (72, 280, 1100)  # global batches whose shares are the sizes of the calibrations
SIZE_S = 0.6
LINK_MBIT = 200.0
RANKS = Path(__file__).with_name("forecast_ranks.py")
NOT_OURS = {"EVENSTRIDE_TRACE": "", "EVENSTRIDE_POLICY": "", "EVENSTRIDE_MAX_STEPS": ""}


@dataclass(frozen=True, slots=True)
class Mix:
    """A set of workers that train a workload together."""

    workload: str
    speeds: tuple[float, ...]
    hosts: bool = False

    @property
    def name(self) -> str:
        """Such as ``text:4:hosts``."""
        return f"{self.workload}:{len(self.speeds)}{':hosts' if self.hosts else ''}"

    @property
    def usd_per_h(self) -> list[float]:
        """Invented prices, because parts of a core cannot be rented: a base price plus speed."""
        return [0.02 + 0.1 * speed for speed in self.speeds]


SPEEDS = {
    1: (0.9,),
    2: (0.9, 0.45),
    4: (0.7, 0.5, 0.3, 0.2),
    8: (0.4, 0.3, 0.25, 0.2, 0.2, 0.15, 0.15, 0.1),
}
MIXES = (
    *(Mix("images", SPEEDS[workers]) for workers in (1, 2, 4)),
    *(Mix("text", SPEEDS[workers]) for workers in (1, 2, 4, 8)),
    *(Mix("text", SPEEDS[workers], hosts=True) for workers in (2, 4)),
)


def launched(
    folder: Path, speeds: Sequence[float], schedule: dict[str, Any], *, apart: bool = False
) -> Any:
    """Run a schedule and return the report of its workers."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, report = folder / "schedule.json", folder / "report.json"
    with _places(len(speeds) if apart else 0) as (spaces, meeting):
        network = {"GLOO_SOCKET_IFNAME": INTERFACE} if apart else {}
        plan.write_text(json.dumps({**schedule, "spaces": spaces, "meeting": meeting}))
        launch = Launch(
            (str(RANKS), str(plan), str(report)),
            tuple(speeds),
            environment={**NOT_OURS, **network},
        )
        limits, _ = open_limits(len(speeds))
        try:
            run(launch, limits, folder)
        finally:
            limits.close()
    return json.loads(report.read_text())


@contextmanager
def _places(number: int) -> Iterator[tuple[list[str], str]]:
    """Yield the namespaces of ``number`` hosts, and the address of the first. May be none."""
    if not number:
        yield [], ""
        return
    with hosts(number, rate_mbit=LINK_MBIT) as (_, many):
        yield [host.space for host in many], many[0].address


def trainings(workload: str, data: Path, folder: Path) -> list[Run]:
    """Return all trainings of a workload. Run them unless they are stored."""
    schedule = {
        "job": "trainings",
        "workload": workload,
        "data": str(data),
        "batches": BATCHES,
        "seeds": SEEDS,
        "target": TARGETS[workload],
        "most_epochs": MOST_EPOCHS,
    }
    found: list[Run] = _kept(
        folder / f"{workload}-trainings.json",
        lambda place: launched(place, (1.0, 1.0), schedule),
    )
    return found


def steps(mix: Mix, data: Path, folder: Path) -> Run:
    """Return the steps of a mix. Measure them unless they are stored."""
    schedule = {
        "job": "steps",
        "workload": mix.workload,
        "data": str(data),
        "batches": BATCHES,
        "speeds": mix.speeds,
        "sizes_of": SIZES_OF,
        "size_s": SIZE_S,
        "rounds": ROUNDS,
        "blocks_between": BLOCKS_BETWEEN,
        "steps": STEPS,
        "cold_steps": COLD_STEPS,
    }
    found: dict[str, Any] = _kept(
        folder / f"{mix.name.replace(':', '-')}.json",
        lambda place: launched(place, mix.speeds, schedule, apart=mix.hosts),
    )
    return {**found, "hosts": mix.hosts, "usd_per_h": mix.usd_per_h}


def _kept(file: Path, measure: Any) -> Any:
    if not file.is_file():
        print(f"measuring {file.stem} ...", file=sys.stderr, flush=True)
        found = measure(file.with_suffix(""))
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def steps_table(rows: Sequence[Stepped]) -> str:
    """Return the step times as a table."""
    cells = tuple(
        (
            *_named(row),
            f"{row.real_s * 1e3:.1f} ms",
            f"{row.forecast_s * 1e3:.1f} ms",
            f"{row.error:+.1%}",
        )
        for row in rows
    )
    return Table(
        ("workload", "workers", "batch", "real", "forecast", "error"), cells, keys=3
    ).text()


def times_table(rows: Sequence[Timed]) -> str:
    """Return the times of whole trainings as a table."""
    heads = ("epochs", "forecast", "time", "forecast", "error", "baseline")
    cells = tuple(
        (
            *_named(row.step),
            f"{row.real_epochs:.2f}",
            f"{row.forecast_epochs.value:.2f}",
            f"{row.real_s:.1f} s",
            f"{row.forecast_s:.1f} s",
            f"{row.error:+.1%}",
            f"{row.plain_error:+.1%}",
        )
        for row in rows
    )
    return Table(("workload", "workers", "batch", *heads), cells, keys=3).text()


def choices_table(rows: Sequence[Stepped], ended: dict[str, list[Run]]) -> str:
    """Return the choices by forecast, and their measured times and costs, as a table."""
    heads = ("chosen", "best", "time above", "cost above", "median time", "median cost")
    cells = tuple(
        (
            workload,
            str(len(known)),
            one.objective,
            *(f"{workers} x {batch}" for workers, batch in (one.chosen, one.best)),
            *(f"{above:+.1%}" for above in (one.time_above, one.cost_above)),
            *(f"{ratio:.2f}" for ratio in (one.time_ratio, one.cost_ratio)),
        )
        for workload, runs in ended.items()
        for known in KNOWN
        for one in picked(
            [row for row in rows if row.workload == workload and not row.hosts],
            runs,
            known,
            SAMPLES,
        )
    )
    return Table(("workload", "batches known", "objective", *heads), cells, keys=3).text()


def _named(row: Stepped) -> tuple[str, str, str]:
    return row.workload, f"{row.workers}{' hosts' if row.hosts else ''}", str(row.batch)


def mean_size(values: Sequence[float]) -> str:
    """Return the mean absolute value, in percent."""
    return f"{np.mean(np.abs(values)):.1%}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("EVENSTRIDE_DATA", "../data")
    parser.add_argument("--data", type=Path, default=Path(data), help="folder of the data sets")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/forecast"), help="folder of the stored runs"
    )
    names = [mix.name for mix in MIXES] + ["images", "text"]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        help="only measure these: 'text' is all trainings of that workload, 'text:4' its steps "
        "with 4 workers",
    )
    parser.add_argument("--plot", type=Path, help="file for a plot of forecast and real times")
    args = parser.parse_args(arguments)
    if not (args.data / "fashion-mnist").is_dir():
        parser.error(f"{args.data} has no folder fashion-mnist; give the right folder with --data")
    if why := cannot_have_hosts():
        parser.error(f"{why}, so workers cannot run on separate hosts")
    return args


def main() -> None:
    """Measure runs that are not stored, and print the errors of the forecasts."""
    args = parse()
    args.runs.mkdir(parents=True, exist_ok=True)
    data, folder = args.data.resolve(), args.runs.resolve()
    if args.only:
        for workload in set(args.only) & {"images", "text"}:
            trainings(workload, data, folder)
        for mix in MIXES:
            if mix.name in args.only:
                steps(mix, data, folder)
        return
    ended = {name: trainings(name, data, folder) for name in TARGETS}
    show(ended, stepped([steps(mix, data, folder) for mix in MIXES]), args.plot)


def show(ended: dict[str, list[Run]], rows: Sequence[Stepped], plot: Path | None) -> None:
    """Print all tables and draw the plot."""
    print(steps_table(rows))
    print(f"steps: mean error {mean_size([row.error for row in rows])}\n")
    times = list(timed(rows, ended, SAMPLES))
    print(times_table(times))
    for workload in ended:
        own = [row for row in times if row.step.workload == workload]
        print(
            f"{workload}: mean error of times {mean_size([row.error for row in own])}, of the "
            f"baseline {mean_size([row.plain_error for row in own])}; "
            f"{len(trained(ended[workload]))} of {len(ended[workload])} trainings reached the loss"
        )
    print(f"all: mean error {mean_size([row.error for row in times])}\n")
    print(choices_table(rows, ended))
    if plot is not None:
        draw(times, plot)


def draw(times: Sequence[Timed], file: Path) -> None:
    """Plot forecast against real times, with the line of equality."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4.5))
    for workload, colour in (("images", "#0072B2"), ("text", "#D55E00")):
        own = [row for row in times if row.step.workload == workload]
        axes.scatter(
            [r.real_s for r in own], [r.forecast_s for r in own], s=18, c=colour, label=workload
        )
    ends = [min(r.real_s for r in times) * 0.8, max(r.real_s for r in times) * 1.25]
    axes.plot(ends, ends, color="#999999", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="real time in s", ylabel="forecast time in s")
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


if __name__ == "__main__":
    main()
