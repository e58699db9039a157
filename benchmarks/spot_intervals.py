"""Measure how many runs on recorded spot machines end within the forecast interval.

    python benchmarks/spot_intervals.py [--hours 2 8 24] [--runs 12] [--json]

The time of a run on one machine is forecast from the first half of each recording, with a 90 %
interval. Runs are replayed from some ticks of the second half, with restarts from the last save.
The figures are the fraction of runs that end within the interval, as a mean over recordings with
its standard error.

The possible drift after a recording is estimated from the differences between halves. The column
"left out" estimates it from all *other* recordings, so that no forecast uses its own second half.
The column "as built" uses the constants of the planner. Recordings of one group cover the same
weeks and are not independent. EVENSTRIDE_DATA is the folder of the recordings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.errors import ConfigError
from evenstride.planner.spot_losses import DRIFT, TOGETHER, WAITS_DRIFT, SaveCosts, slowdown
from evenstride.planner.spot_recordings import from_recorded, waits_s
from evenstride.sim.scenario.recordings import Machines, SpotTrace, load_spot_traces, machines

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.spot_replay import SpotJob, Way, replay

STEP_S, SAVE_S, RESTART_S = 1.044, 10.0, 60.0
WAY = Way("restart from the last save", elastic=False, memory=False, saving=Saving())
ROUNDING = 0.001  # relative; replays have whole steps


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences of rates and waits between halves, and their correlation."""

    rates: float
    waits: float
    together: float


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one length of a run."""

    hours: float
    recordings: int
    left_out: float
    left_out_error: float
    as_built: float
    as_built_error: float


BUILT = Drift(DRIFT, WAITS_DRIFT, TOGETHER)


def halves() -> list[tuple[SpotTrace, SpotTrace]]:
    """Return both halves of the recordings with losses in each half."""
    found = [(one.part(0.0, 0.5), one.part(0.5, 1.0)) for one in load_spot_traces()]
    return [pair for pair in found if all(_changes(half)[0] > 0.0 for half in pair)]


def _changes(half: SpotTrace) -> tuple[float, float]:
    """Return losses per machine-second, and the mean wait after a loss including a restart."""
    seen = machines([half])
    ticks = len(seen.who)
    lost = int((seen.gone < ticks).sum())
    up_s = float((seen.who >= 0).sum()) * seen.gap_s
    waits = waits_s(seen, 1)
    return (lost / up_s if up_s else 0.0), RESTART_S + (float(np.mean(waits)) if waits else 0.0)


def changes(pairs: Sequence[tuple[SpotTrace, SpotTrace]]) -> FloatArray:
    """Return logarithms of the ratios of rate and wait between halves, ``(recordings, 2)``."""
    found = [(_changes(before), _changes(after)) for before, after in pairs]
    return np.array([np.log(np.divide(after, before)) for before, after in found])


def drift_of(changed: FloatArray) -> Drift:
    """Return the root mean square changes. They are centred at 0, because signs are unknown."""
    rates, waits = np.sqrt((changed**2).mean(axis=0)).tolist()
    return Drift(rates, waits, float((changed[:, 0] * changed[:, 1]).mean()) / (rates * waits))


def part_within(pair: tuple[SpotTrace, SpotTrace], hours: float, runs: int, by: Drift) -> float:
    """Return the fraction of runs on the second half within the interval, NaN if none fits."""
    recorded = machines([pair[0]])
    waits = tuple(RESTART_S + wait for wait in waits_s(recorded, 1))
    transience = from_recorded(recorded, 2.0 * hours * 3600.0, drift=by.rates)
    saves = SaveCosts(SAVE_S, waits, drift=by.waits, together=by.together)
    found = slowdown(transience, 1, hours * 3600.0, saves)
    low, high = found.low * (1.0 - ROUNDING), found.high * (1.0 + ROUNDING)
    inside = [low <= one <= high for one in taken(pair[1], hours, found.high, runs)]
    return float(np.mean(inside)) if inside else float("nan")


def taken(half: SpotTrace, hours: float, most: float, runs: int) -> list[float]:
    """Return the relative times of runs that began at ticks with a machine.

    Each start leaves time for ``most``. A run that is not finished at the end took longer.
    """
    needed = int(most * hours * 3600.0 / half.gap_s)
    starts = np.flatnonzero(half.up[: max(len(half.up) - needed, 0)])
    if not len(starts):
        return []
    found = []
    for tick in starts[np.linspace(0, len(starts) - 1, runs).astype(int)]:
        recorded: Machines = machines([replace(half, up=half.up[tick:])])
        job, useful_s = _job(hours, recorded.who.shape[1])
        (outcome,) = replay(recorded, job, [WAY])
        found.append((outcome.total_s - RESTART_S) / useful_s if outcome.finished else np.inf)
    return found


def _job(hours: float, slots: int) -> tuple[SpotJob, float]:
    """Return a job for one machine, and its time without saves and losses."""
    steps = int(hours * 3600.0 / STEP_S)
    times = (0.02,) * slots, (0.002,) * slots
    job = SpotJob(512 * steps, 512, *times, 1, save_s=SAVE_S, restart_s=RESTART_S)
    return job, steps * job.step_s(np.zeros(1, dtype=np.int64))


def measured(pairs: Sequence[tuple[SpotTrace, SpotTrace]], hours: float, runs: int) -> Row:
    """Return the figures of runs of one length."""
    changed = changes(pairs)
    others = [drift_of(np.delete(changed, at, axis=0)) for at in range(len(pairs))]
    left = [part_within(pair, hours, runs, by) for pair, by in zip(pairs, others, strict=True)]
    built = [part_within(pair, hours, runs, BUILT) for pair in pairs]
    used = int(np.isfinite(left).sum())
    return Row(hours, used, *_mean(left), *_mean(built))


def _mean(parts: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error of the finite values."""
    known = np.array([part for part in parts if np.isfinite(part)])
    return float(known.mean()), float(known.std(ddof=1)) / sqrt(len(known))


def main(arguments: Sequence[str] | None = None) -> int:
    """Forecast, replay and print. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, nargs="+", default=[2.0, 8.0, 24.0])
    parser.add_argument("--runs", type=int, default=12, help="runs of each recording")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    try:
        pairs = halves()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    now = drift_of(changes(pairs))
    rows = [measured(pairs, hours, args.runs) for hours in args.hours]
    if args.json:
        print(json.dumps({"drift": asdict(now), "rows": [asdict(row) for row in rows]}))
        return 0
    print(f"halves of {len(pairs)} recordings differ by {now.rates:.2f} (rates) and ", end="")
    print(f"{now.waits:.2f} (waits), correlation {now.together:.2f}")
    print("| hours | recordings | left out | as built |\n|--:|--:|--:|--:|")
    for row in rows:
        left = f"{row.left_out:.1%} +- {row.left_out_error:.1%}"
        built = f"{row.as_built:.1%} +- {row.as_built_error:.1%}"
        print(f"| {row.hours:g} | {row.recordings} | {left} | {built} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
