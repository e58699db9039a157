"""Runs the missing cells of a figure on throttled processes, stores each result, and draws.

All figures share this command line:

    python benchmarks/papers/FIGURE.py [--only WORD,...] [--minutes N] [--list] [--json]
        [--draw SVG]

`--only` takes the cells in which each word is the job, cluster, policy, mode or seed. In a figure
that compares cells, the equal and the calibrated split run again in a group whose other cells are
missing. `--minutes` starts no cell after that time. `--list` prints the cells and which of them
have a result. Without cells that are missing, nothing is trained. The exit code is 3 if a cell is
still missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.papers.cells import (
    FIXED,
    JOBS,
    REGRESSION,
    RESULTS,
    UNIFORM,
    CellStore,
    PaperCell,
    PaperCluster,
    Record,
    cell_of,
    disturbed,
    groups,
)

from evenstride.errors import LaunchError
from evenstride.lab.demo.demo_schedule import Filed
from evenstride.lab.demo.fashion_mnist import read_images
from evenstride.lab.processes.cpu_limits import Limits, open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import check_fit, pin, place, usable_cpus
from evenstride.report.plotting import repeatable, save
from evenstride.report.wording import Table
from evenstride.trace.read import LineTail

SCRIPT = Path(__file__).with_name("paper_ranks.py")
DATA, NEWS, PLAN = "data.npz", "news.jsonl", "plan.json"
TESTED, MISSING, DEADLINE_S = 512, 3, 900.0
NOT_OURS = dict.fromkeys(
    ("EVENSTRIDE_TRACE", "EVENSTRIDE_POLICY", "EVENSTRIDE_MAX_STEPS", "EVENSTRIDE_SYNC"), ""
)


@dataclass(frozen=True, slots=True)
class CellPlan(Filed):
    """What the ranks of a group do."""

    cells: list[PaperCell]
    cluster: PaperCluster
    until_s: float  # time since 1970 after which no cell begins

    @staticmethod
    def plain(value: Any) -> Any:
        """Return a value for JSON."""
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@dataclass(frozen=True, slots=True)
class CellConductor:
    """Applies and stores what rank 0 reports: speeds, and the results of cells."""

    plan: CellPlan
    limits: Limits
    tail: LineTail
    store: CellStore
    pids: list[int]

    def look(self, _: LaunchProgress) -> None:
        """Read the news and act on them."""
        for news in self.tail.records():
            if news["what"] == "pids":
                self.pids.extend(news["pids"])
            elif news["what"] == "speeds":
                self.set_speeds(news["speeds"])
            elif news["what"] == "cell":
                record = {**news["cell"], "date": date.today().isoformat(), **news["found"]}
                self.store.add(record)
                say(line(record))

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Give the workers these speeds, and cores with enough capacity."""
        cores = place(tuple(speeds), usable_cpus())
        for worker, speed in enumerate(speeds):
            with contextlib.suppress(FileNotFoundError):  # the process has ended
                pin(self.pids[worker], cores[worker] if cores else None)
            self.limits.set_speed(worker, speed)


def line(record: Record) -> str:
    """Return a line on a result for the screen."""
    name = "{job}, {cluster}, {policy}, {sync}, seed {seed}".format(**record)
    note = f"drift {record['drift']:.1%}" + (", disturbed" if disturbed(record) else "")
    if "time_s" not in record:
        return f"{name}: {note}"
    steps = len(record["steps_ms"])
    return f"{name}: {record['time_s']:.1f} s, {steps} steps, {record['shares']}, {note}"


def write_data(job: str, path: Path) -> None:
    """Write the samples of a job, in whole batches, so that throttled ranks read them quickly."""
    folder = Path(os.environ.get("EVENSTRIDE_DATA") or "../shared/data")
    whole = JOBS[job].batch * JOBS[job].epoch_steps
    if job == REGRESSION:
        table = np.loadtxt(folder / "uci-regression" / "power-plant.txt.gz")
        table = ((table - table.mean(0)) / table.std(0)).astype(np.float32)
        x, y = table[:, :-1], table[:, -1:]
        held = slice(whole, whole + TESTED)
        np.savez(path, x=x[:whole], y=y[:whole], test_x=x[held], test_y=y[held])
        return
    kept: dict[str, Any] = {}
    for part, most, prefix in (("train", whole, ""), ("test", TESTED, "test_")):
        images, labels = read_images(folder / "fashion-mnist", part)
        pixels = images[:most, np.newaxis].astype(np.float32) / 255
        kept |= {
            prefix + "x": (pixels - 0.286) / 0.353,
            prefix + "y": labels[:most].astype("int64"),
        }
    np.savez(path, **kept)


def train(plan: CellPlan, store: CellStore) -> None:
    """Train a group of cells and store their results."""
    speeds = plan.cluster.speeds
    check_fit(speeds, usable_cpus())
    limits, caveat = open_limits(len(speeds))
    if caveat:
        say(caveat)
    with contextlib.closing(limits), tempfile.TemporaryDirectory(prefix="evenstride-") as name:
        folder = Path(name)
        plan.save(folder / PLAN)
        write_data(plan.cells[0].job, folder / DATA)
        conductor = CellConductor(plan, limits, LineTail(folder / NEWS), store, [])
        launch = Launch(
            (str(SCRIPT), name), speeds, environment=dict(NOT_OURS), deadline_s=DEADLINE_S
        )
        try:
            run(launch, limits, folder, conductor.look)
        finally:
            conductor.look(LaunchProgress(0, 0.0))


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """An experiment: its cells in the order in which they run, and how its results are shown."""

    name: str
    about: str
    clusters: Callable[[], dict[str, PaperCluster]]
    cells: tuple[PaperCell, ...]
    rows: Callable[[Sequence[Record]], Table]
    draw: Callable[[Sequence[Record]], Any]
    # Whether rows compare cells, so that they need all results to find those of one group.
    compares: bool = False

    @property
    def store(self) -> CellStore:
        return CellStore(RESULTS / f"{self.name}.jsonl")

    def results(self) -> list[Record]:
        """Return the results of the cells, in their order: the best of each, or all of each."""
        order = {cell: number for number, cell in enumerate(self.cells)}
        records = self.store.records() if self.compares else self.store.best().values()
        known = [record for record in records if cell_of(record) in order]
        return sorted(known, key=lambda record: order[cell_of(record)])

    def write_plot(self, records: Sequence[Record], path: Path) -> None:
        """Draw results into an SVG, with text as text, which is a fifth as large as outlines."""
        from matplotlib import rc_context

        with repeatable(), rc_context({"svg.fonttype": "none"}):
            save(self.draw(records), path, 100)

    def references(self, group: Sequence[PaperCell]) -> list[PaperCell]:
        """Return the cells that a group needs, too, because its results are compared with them."""
        together, has = group[0].together, {cell.policy for cell in group}
        if not self.compares or not has - {UNIFORM, FIXED}:
            return []
        return [
            cell
            for cell in self.cells
            if cell.together == together and cell.policy in {UNIFORM, FIXED} - has
        ]

    def run(self, wanted: Iterable[PaperCell], minutes: float) -> None:
        """Train the missing cells among those wanted."""
        until_s = time.time() + 60 * minutes
        for group in groups(self.store.missing(wanted)):
            if time.time() >= until_s:
                return
            cells = [*self.references(group), *group]
            plan = CellPlan(cells, self.clusters()[group[0].cluster], until_s)
            try:
                train(plan, self.store)
            except LaunchError as error:
                say(f"{group[0].job}, {group[0].cluster}: the group ended early: {error}")

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Train, show and draw. Return the exit code."""
        args = parsed(self.about, arguments)
        words = args.only.split(",") if args.only else []
        wanted = [cell for cell in self.cells if cell.has(words)]
        if not wanted:
            print(f"no cell has all of {args.only}; --list prints the cells")
            return 2
        if args.list:
            missing = set(self.store.missing(wanted))
            for cell in wanted:
                print("missing" if cell in missing else "done   ", *asdict(cell).values())
            return 0
        self.run(wanted, args.minutes)
        results = self.results()
        print(json.dumps(results) if args.json else self.rows(results).text())
        if args.draw is not None and results:
            self.write_plot(results, args.draw)
        return MISSING if self.store.missing(wanted) else 0


def parsed(about: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--only", default="", help="words that each cell must have")
    parser.add_argument("--minutes", type=float, default=60.0, help="no cell begins after that")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--draw", type=Path, help="SVG file to draw")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
