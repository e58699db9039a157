"""Fit models of lifetimes to recorded spot machines, and replay a training on them.

    python benchmarks/spot.py [--trace NAME] [--hours H] [--save-s S] [--restart-s S] [--json]

Each group of recordings has two halves. Models are fitted to the first. A job is replayed on the
second, with several ways of handling losses. A group of single machines is one fleet, with a
machine from each zone. A recording of several machines is a fleet by itself.

The job has 512 samples per step. Each machine takes 20 ms plus 2 ms per sample, and the gradient
has 100 MB, sent at 1.25 GB/s. The length of the job is a tenth of the half, or `--hours`. Its size
is the median number of machines that were up in the first half, at least two. Ways with a fixed
number of machines use that size, the others use all machines. EVENSTRIDE_DATA is the folder of the
recordings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.survival_fit import ChosenModel, FittedLifetime, Lives, choose
from evenstride.errors import ConfigError
from evenstride.sim.scenario.recordings import (
    Machines,
    SpotTrace,
    load_spot_traces,
    machines,
    spot_traces,
)
from evenstride.sim.scenario.scenario_model import Communication

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.spot_replay import (
    ELASTIC,
    FIXED,
    LIVE,
    SCRATCH,
    WAIT,
    SpotJob,
    SpotOutcome,
    Way,
    replay,
)

BATCH, FIXED_S, PER_SAMPLE_S = 512, 0.02, 0.002
COMMUNICATION = Communication(latency_s=1e-4, bytes_per_s=1.25e9, gradient_bytes=1e8)
PART = 0.1  # length of the job relative to the replayed half
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A fleet, its fit and the outcomes of the job."""

    name: str
    gap_s: float
    slots: int
    up: float
    chosen: ChosenModel
    job: SpotJob
    ideal_s: float
    outcomes: tuple[SpotOutcome, ...]


def fleets(traces: Sequence[SpotTrace]) -> dict[str, list[SpotTrace]]:
    """Return the recordings of each fleet."""
    found: dict[str, list[SpotTrace]] = {}
    for trace in traces:
        alone = int(trace.up.max()) > 1
        found.setdefault(trace.name if alone else trace.group, []).append(trace)
    return found


def lives(fleet: Sequence[SpotTrace]) -> Lives:
    """Return the lifetimes of all machines of a fleet, zone by zone."""
    return machines(fleet).lives()


def ways(chosen: ChosenModel) -> tuple[Way, ...]:
    """Return all ways. Those that save by age use the fitted model."""
    aware = Saving(lifetime=chosen.fit.lifetime)
    often = replace(FIXED, name="elastic, saves every 30 min", elastic=True)
    by_age = replace(ELASTIC, name="elastic, saves by age", saving=aware)
    return SCRATCH, WAIT, FIXED, often, ELASTIC, by_age, LIVE


def job_of(seen: Machines, replayed: Machines, args: argparse.Namespace) -> SpotJob:
    """Return the job of a fleet, from the first half and the half to replay."""
    slots = max(seen.who.shape[1], replayed.who.shape[1])
    size = int(np.clip(np.median((seen.who >= 0).sum(axis=1)), 2, replayed.who.shape[1]))
    length_s = args.hours * HOUR_S if args.hours else PART * len(replayed.who) * replayed.gap_s
    times = (FIXED_S,) * slots, (PER_SAMPLE_S,) * slots
    job = SpotJob(1, BATCH, *times, size, args.save_s, args.restart_s, 2.0, COMMUNICATION)
    steps = max(1, round(length_s / job.step_s(np.arange(size))))
    return replace(job, samples=steps * BATCH)


def measured(name: str, fleet: Sequence[SpotTrace], args: argparse.Namespace) -> Row:
    """Return the fit to the first half, and the outcomes of the job on the second."""
    seen = machines([trace.part(0.0, 0.5) for trace in fleet])
    later = machines([trace.part(0.5, 1.0) for trace in fleet])
    chosen, job = choose(seen.lives(), inf), job_of(seen, later, args)
    ideal_s = job.samples // BATCH * job.step_s(np.arange(job.size))
    up = float((later.who >= 0).sum(axis=1).mean())
    outcomes = replay(later, job, ways(chosen))
    return Row(name, later.gap_s, later.who.shape[1], up, chosen, job, ideal_s, outcomes)


def lines(row: Row) -> list[str]:
    """Return the table of a fleet."""
    text = [
        f"## {row.name}",
        f"{row.slots} machines at most, {row.up:.1f} up on average, ticks of {row.gap_s:.0f} s; "
        f"the job takes {row.ideal_s / HOUR_S:.1f} h on {row.job.size} machines",
        row.chosen.reason,
        "| way | h | train | save | restart | wait | losses | saves | recomputed | machine-h |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for out in row.outcomes:
        far = f"unfinished ({out.committed / row.job.samples:.0%} done)"
        took = f"{out.total_s / HOUR_S:.1f}" if out.finished else far
        spent = (out.train_s, out.save_s, out.restart_s, out.wait_s)
        hours = " | ".join(f"{part_s / HOUR_S:.1f}" for part_s in spent)
        again = f"{out.recomputed / row.job.samples:.1%}"
        text.append(
            f"| {out.way} | {took} | {hours} | {out.losses} | {out.saves} | {again} | "
            f"{out.machine_s / HOUR_S:.0f} |"
        )
    return text


def fit_lines(fits: dict[str, tuple[Lives, ChosenModel]]) -> list[str]:
    """Return the table of fits to whole recordings."""
    text = ["| fleet | machines | lost | chosen | AIC | distance |", "|---|--:|--:|---|---|---|"]
    for name, (seen, chosen) in fits.items():
        all_fits = sorted((chosen.fit, *chosen.others), key=lambda fit: fit.parameters)
        aic = ", ".join(f"{_kind(fit)} {fit.aic:.0f}" for fit in all_fits)
        far = ", ".join(f"{fit.distance:.3f}" for fit in all_fits)
        reason = chosen.reason.split(":")[0]
        text.append(f"| {name} | {len(seen.age_s)} | {seen.deaths} | {reason} | {aic} | {far} |")
    return text


def _kind(fit: FittedLifetime) -> str:
    return type(fit.lifetime).__name__


def as_json(row: Row) -> dict[str, Any]:
    """Return the figures of a fleet as JSON types."""
    fits = [row.chosen.fit, *row.chosen.others]
    models = [
        {"model": _kind(fit), "aic": fit.aic, "distance": fit.distance, **_parameters(fit)}
        for fit in fits
    ]
    ways = [asdict(out) | {"total_s": out.total_s} for out in row.outcomes]
    return {
        "name": row.name,
        "gap_s": row.gap_s,
        "slots": row.slots,
        "size": row.job.size,
        "mean_up": row.up,
        "reason": row.chosen.reason,
        "fits": models,
        "ideal_s": row.ideal_s,
        "ways": ways,
    }


def _parameters(fit: FittedLifetime) -> dict[str, Any]:
    found = asdict(fit.lifetime)
    return {name: value for name, value in found.items() if value != inf}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default="", help="recording or group (default: all)")
    parser.add_argument("--hours", type=float, default=0.0, help="length of the undisturbed job")
    parser.add_argument("--save-s", type=float, default=10.0, help="time of a save")
    parser.add_argument("--restart-s", type=float, default=60.0, help="time of a restart")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, replay and print. Return the exit code."""
    args = parse(arguments)
    try:
        found = fleets(spot_traces(args.trace) if args.trace else load_spot_traces())
        fits = {}
        for name, fleet in found.items():
            seen = lives(fleet)
            fits[name] = seen, choose(seen, inf)
        rows = [measured(name, fleet, args) for name, fleet in found.items() if _losses(fleet)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([as_json(row) for row in rows]))
        return 0
    print("\n".join([*fit_lines(fits), *(line for row in rows for line in ["", *lines(row)])]))
    return 0


def _losses(fleet: Sequence[SpotTrace]) -> bool:
    """Return whether the first half has losses, which the fit needs."""
    return machines([trace.part(0.0, 0.5) for trace in fleet]).lives().deaths > 0


if __name__ == "__main__":
    raise SystemExit(main())
