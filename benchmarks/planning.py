"""Measure the time of a plan over a catalogue, with mixes of up to two types and 32 machines.

    python benchmarks/planning.py --catalog FILE [--machines 32] [--on DAY] [--json]

Two types are measured, a machine with an accelerator and one without. The others are derived from
them. There are five global batches. Epochs follow from a gradient noise that is known to within
50 %. Wall-clock and processor time cover reading the catalogue, deriving its types, and finding the
frontier and the choice. For each plan, the table has the objective, the number of configurations,
the number of those that were evaluated exactly, the gap, and the chosen cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter, process_time

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue
from evenstride.planner.make_plan import make_plan
from evenstride.planner.search.candidates import rentable
from evenstride.planner.search.selection import Objective, Wishes
from evenstride.planner.search.training_forecast import TrainingTask
from evenstride.planner.workload.epochs_to_target import ByNoise
from evenstride.planner.workload.workload_profile import DeviceProfile, Noise, Point

BATCHES = (128, 256, 512, 1024, 2048)
MEASURED = (("g4dn.xlarge", 0.010, 0.001), ("c5.xlarge", 0.020, 0.010))  # fixed_s, per_sample_s
TASK = TrainingTask(1_000_000, ByNoise(10, 512, Noise(scale=2000.0, low=1500.0, high=3000.0)), 1e8)
LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One timed plan."""

    spot: bool
    objective: str
    confidence: float
    wall_s: float
    cpu_s: float
    looked_at: int
    judged: int
    gap: float
    chosen: str


def devices() -> list[DeviceProfile]:
    """Return the profiles of the measured types."""
    return [
        DeviceProfile(
            type=name,
            points=tuple(
                Point(samples=b, step_s=fixed_s + b * each_s, scatter=0.02) for b in (8, 32, 128)
            ),
        )
        for name, fixed_s, each_s in MEASURED
    ]


def planned(catalogue: Path, on: date, spot: bool, wishes: Wishes, most: int) -> Row:
    """Plan once and measure the time."""
    wall_s, cpu_s = perf_counter(), process_time()
    kinds = rentable(read_catalogue(catalogue).offers, devices(), on, spot=spot).kinds
    plan = make_plan(kinds, TASK, wishes, BATCHES, most_machines=most)
    wall_s, cpu_s = perf_counter() - wall_s, process_time() - cpu_s
    found, choice = plan.found, plan.chosen.outlook.choice
    name = f"{choice.name}, batch {choice.batch}"
    wish = wishes.aim.value, wishes.confidence
    return Row(spot, *wish, wall_s, cpu_s, found.looked_at, found.judged, plan.gap, name)


def rows(catalogue: Path, on: date, most: int) -> Iterator[Row]:
    """Yield plans for every objective, as expected and with confidence, without and with spot."""
    for spot in (False, True):
        for confidence in (0.5, 0.9):
            for objective in Objective:
                yield planned(catalogue, on, spot, Wishes(objective, confidence=confidence), most)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan and print. Return the exit code, 1 if a plan took longer than `LIMIT_S`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--catalog", type=Path, required=True, help="catalogue, a CSV file")
    parser.add_argument("--machines", type=int, default=32, help="largest cluster")
    parser.add_argument(
        "--on", type=date.fromisoformat, default=date.today(), help="date of prices"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    try:
        found = list(rows(args.catalog, args.on, args.machines))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([asdict(row) for row in found]))
    else:
        print("\n".join(table(found)))
    return int(max(row.wall_s for row in found) > LIMIT_S)


def table(found: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| spot | objective | confidence | s | CPU s | choices | judged | gap | chosen |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|---|"
    for row in found:
        yield (
            f"| {'yes' if row.spot else 'no'} | {row.objective} | {row.confidence:.0%} | "
            f"{row.wall_s:.1f} | {row.cpu_s:.1f} | {row.looked_at:,} | {row.judged:,} | "
            f"{row.gap:.1%} | {row.chosen} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
