"""Does a plan tell what trainings really take? Forecasts of times and epochs beside measurements.

    python benchmarks/forecast.py --data ../data [--runs runs/forecast] [--only images:4 ...]

Two workloads (`forecast_work.py`) are trained to a loss on held-out data at six batches with three
seeds each, which gives epochs; and real, throttled workers of unequal speeds, 1, 2, 4 and 8 of
them, take steps at each batch, which gives the time of a step. A training takes the product: its
trajectory does not depend on how many workers there are. Some mixes are repeated on hosts of their
own, network namespaces whose links are slow.

Forecast is each time of a whole training from everything but itself:

- epochs from the trainings at the *other* batches, by the law that fits them;
- a worker's step from calibrations around each block of steps, at sizes that no batch gives it;
- communication from what steps of mixes with *other* numbers of workers took beyond that, of both
  workloads: throttled workers answer late, which no lone all-reduce shows;
- so every batch, and every number of workers, is left out of what forecasts it.

The baseline takes the same steps, but epochs on a line between the smallest and the largest batch,
without gradients. Every run is kept as JSON in a folder; what is there already is not run again.
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
KNOWN = ((64, 192, 1024), BATCHES)  # batches that a choice knows trainings at: few, and all
SEEDS = (0, 1, 2)
TARGETS = {"images": 0.55, "text": 2.45}
MOST_EPOCHS = 40
ROUNDS, STEPS, COLD_STEPS = 5, 8, 12
BLOCKS_BETWEEN = 2  # calibrations
SIZES_OF = (72, 280, 1100)  # global batches at whose shares workers are calibrated
SIZE_S = 0.6
LINK_MBIT = 200.0
RANKS = Path(__file__).with_name("forecast_ranks.py")
NOT_OURS = {"EVENSTRIDE_TRACE": "", "EVENSTRIDE_POLICY": "", "EVENSTRIDE_MAX_STEPS": ""}


@dataclass(frozen=True, slots=True)
class Mix:
    """Workers that train a workload together."""

    workload: str
    speeds: tuple[float, ...]
    hosts: bool = False

    @property
    def name(self) -> str:
        """Such as ``text:4:hosts``."""
        return f"{self.workload}:{len(self.speeds)}{':hosts' if self.hosts else ''}"

    @property
    def usd_per_h(self) -> list[float]:
        """Made up, as nobody rents parts of a core: a machine's own price, and its speed's."""
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
    """Return what the workers of a schedule report."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, report = folder / "schedule.json", folder / "report.json"
    with _places(len(speeds) if apart else 0) as (spaces, meeting):
        network = {"GLOO_SOCKET_IFNAME": INTERFACE} if apart else {}
        asked.write_text(json.dumps({**schedule, "spaces": spaces, "meeting": meeting}))
        launch = Launch(
            (str(RANKS), str(asked), str(report)),
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
    """Yield the namespaces of so many hosts, and the address of the first; none of none."""
    if not number:
        yield [], ""
        return
    with hosts(number, rate_mbit=LINK_MBIT) as (_, many):
        yield [host.space for host in many], many[0].address


def trainings(workload: str, data: Path, folder: Path) -> list[Run]:
    """Return all trainings of a workload; run those that are not kept yet."""
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
    """Return the steps of a mix; measure them if they are not kept yet."""
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
    """Return the times of steps as people read them."""
    cells = tuple(
        (
            *_named(row),
            f"{row.real_s * 1e3:.1f} ms",
            f"{row.told_s * 1e3:.1f} ms",
            f"{row.error:+.1%}",
        )
        for row in rows
    )
    return Table(("workload", "workers", "batch", "real", "forecast", "off"), cells, keys=3).text()


def times_table(rows: Sequence[Timed]) -> str:
    """Return the times of whole trainings as people read them."""
    heads = ("epochs", "forecast", "time", "forecast", "off", "baseline")
    cells = tuple(
        (
            *_named(row.step),
            f"{row.real_epochs:.2f}",
            f"{row.told_epochs.value:.2f}",
            f"{row.real_s:.1f} s",
            f"{row.told_s:.1f} s",
            f"{row.error:+.1%}",
            f"{row.plain_error:+.1%}",
        )
        for row in rows
    )
    return Table(("workload", "workers", "batch", *heads), cells, keys=3).text()


def choices_table(rows: Sequence[Stepped], ended: dict[str, list[Run]]) -> str:
    """Return what would be chosen by forecasts, and what that comes to."""
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
    """Return the mean of the values' sizes, in per cent."""
    return f"{np.mean(np.abs(values)):.1%}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("EVENSTRIDE_DATA", "../data")
    parser.add_argument("--data", type=Path, default=Path(data), help="folder of the data sets")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/forecast"), help="where runs are kept"
    )
    names = [mix.name for mix in MIXES] + ["images", "text"]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        help="measure these, and judge nothing: text is "
        "all trainings of it, text:4 its steps with 4 workers",
    )
    parser.add_argument("--plot", type=Path, help="file for a plot of forecast and real times")
    asked = parser.parse_args(arguments)
    if not (asked.data / "fashion-mnist").is_dir():
        parser.error(f"there is no fashion-mnist in {asked.data}; give --data its folder")
    if why := cannot_have_hosts():
        parser.error(f"{why}, so workers cannot have hosts of their own")
    return asked


def main() -> None:
    """Measure what is not kept yet, and print how far the forecasts are off."""
    asked = parse()
    asked.runs.mkdir(parents=True, exist_ok=True)
    data, folder = asked.data.resolve(), asked.runs.resolve()
    if asked.only:
        for workload in set(asked.only) & {"images", "text"}:
            trainings(workload, data, folder)
        for mix in MIXES:
            if mix.name in asked.only:
                steps(mix, data, folder)
        return
    ended = {name: trainings(name, data, folder) for name in TARGETS}
    show(ended, stepped([steps(mix, data, folder) for mix in MIXES]), asked.plot)


def show(ended: dict[str, list[Run]], rows: Sequence[Stepped], plot: Path | None) -> None:
    """Print all tables, and draw the plot."""
    print(steps_table(rows))
    print(f"steps: {mean_size([row.error for row in rows])} off on average\n")
    times = list(timed(rows, ended, SAMPLES))
    print(times_table(times))
    for workload in ended:
        own = [row for row in times if row.step.workload == workload]
        print(
            f"{workload}: times {mean_size([row.error for row in own])} off on average, baseline "
            f"{mean_size([row.plain_error for row in own])}; "
            f"{len(trained(ended[workload]))} of {len(ended[workload])} trainings came to the loss"
        )
    print(f"all: {mean_size([row.error for row in times])}\n")
    print(choices_table(rows, ended))
    if plot is not None:
        draw(times, plot)


def draw(times: Sequence[Timed], file: Path) -> None:
    """Draw forecast over real times, with the line on which they are equal."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4.5))
    for workload, colour in (("images", "#0072B2"), ("text", "#D55E00")):
        own = [row for row in times if row.step.workload == workload]
        axes.scatter(
            [r.real_s for r in own], [r.told_s for r in own], s=18, c=colour, label=workload
        )
    ends = [min(r.real_s for r in times) * 0.8, max(r.real_s for r in times) * 1.25]
    axes.plot(ends, ends, color="#999999", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="real time in s", ylabel="forecast time in s")
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


if __name__ == "__main__":
    main()
