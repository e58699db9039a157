"""Recorded spot machines: which model of lifetimes fits them, and what training on them would take.

    python benchmarks/spot.py [--trace NAME] [--hours H] [--save-s S] [--restart-s S] [--json]

Each group of recordings is cut in two. The first half is what models are fitted to; on the second
half a job is replayed, in several ways of living with losses. Groups of single machines are taken
as one fleet, a machine from each zone; a recording of several machines is a fleet of its own.

The job has 512 samples to a step; each machine takes 20 ms and 2 ms per sample, and the gradient
has 100 MB, at 1.25 GB/s. It is as long as a tenth of the half, or `--hours`, on as many machines as
were up half of the time in the first half, at least two. Ways that cannot change their number use
just as many, the others all that are there. EVENSTRIDE_DATA names the folder of the recordings.
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

# A script finds its own folder only.
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
PART = 0.1  # of the half that is replayed: how long the job is
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A fleet, its fit and what became of the job."""

    name: str
    gap_s: float
    slots: int
    up: float
    chosen: ChosenModel
    job: SpotJob
    ideal_s: float
    outcomes: tuple[SpotOutcome, ...]


def fleets(traces: Sequence[SpotTrace]) -> dict[str, list[SpotTrace]]:
    """Return the recordings that are one fleet each."""
    found: dict[str, list[SpotTrace]] = {}
    for trace in traces:
        alone = int(trace.up.max()) > 1
        found.setdefault(trace.name if alone else trace.group, []).append(trace)
    return found


def lives(fleet: Sequence[SpotTrace]) -> Lives:
    """Return the lives of all machines of a fleet, of one zone after another."""
    return machines(fleet).lives()


def ways(chosen: ChosenModel) -> tuple[Way, ...]:
    """Return all ways, the aware ones with the model that was fitted."""
    aware = Saving(lifetime=chosen.fit.lifetime)
    often = replace(FIXED, name="elastic, saves every 30 min", elastic=True)
    by_age = replace(ELASTIC, name="elastic, saves by age", saving=aware)
    return SCRATCH, WAIT, FIXED, often, ELASTIC, by_age, LIVE


def job_of(seen: Machines, told: Machines, asked: argparse.Namespace) -> SpotJob:
    """Return the job for a fleet, of which the first half has been seen."""
    slots = max(seen.who.shape[1], told.who.shape[1])
    size = int(np.clip(np.median((seen.who >= 0).sum(axis=1)), 2, told.who.shape[1]))
    length_s = asked.hours * HOUR_S if asked.hours else PART * len(told.who) * told.gap_s
    times = (FIXED_S,) * slots, (PER_SAMPLE_S,) * slots
    job = SpotJob(1, BATCH, *times, size, asked.save_s, asked.restart_s, 2.0, COMMUNICATION)
    steps = max(1, round(length_s / job.step_s(np.arange(size))))
    return replace(job, samples=steps * BATCH)


def measured(name: str, fleet: Sequence[SpotTrace], asked: argparse.Namespace) -> Row:
    """Return the fit to the first half, and the job on the second."""
    seen = machines([trace.part(0.0, 0.5) for trace in fleet])
    told = machines([trace.part(0.5, 1.0) for trace in fleet])
    chosen, job = choose(seen.lives(), inf), job_of(seen, told, asked)
    ideal_s = job.samples // BATCH * job.step_s(np.arange(job.size))
    up = float((told.who >= 0).sum(axis=1).mean())
    outcomes = replay(told, job, ways(chosen))
    return Row(name, told.gap_s, told.who.shape[1], up, chosen, job, ideal_s, outcomes)


def lines(row: Row) -> list[str]:
    """Return a fleet's table."""
    told = [
        f"## {row.name}",
        f"{row.slots} machines at most, {row.up:.1f} up on average, a tick of {row.gap_s:.0f} s; "
        f"the job: {row.ideal_s / HOUR_S:.1f} h on {row.job.size} machines",
        row.chosen.reason,
        "| way | h | train | save | restart | wait | losses | saves | recomputed | machine-h |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for out in row.outcomes:
        far = f"never ({out.committed / row.job.samples:.0%} there)"
        took = f"{out.total_s / HOUR_S:.1f}" if out.finished else far
        spent = (out.train_s, out.save_s, out.restart_s, out.wait_s)
        hours = " | ".join(f"{part_s / HOUR_S:.1f}" for part_s in spent)
        again = f"{out.recomputed / row.job.samples:.1%}"
        told.append(
            f"| {out.way} | {took} | {hours} | {out.losses} | {out.saves} | {again} | "
            f"{out.machine_s / HOUR_S:.0f} |"
        )
    return told


def fit_lines(fits: dict[str, tuple[Lives, ChosenModel]]) -> list[str]:
    """Return the table of fits to whole recordings."""
    told = ["| fleet | lives | lost | chosen | AIC | distance |", "|---|--:|--:|---|---|---|"]
    for name, (seen, chosen) in fits.items():
        all_fits = sorted((chosen.fit, *chosen.others), key=lambda fit: fit.parameters)
        aic = ", ".join(f"{_kind(fit)} {fit.aic:.0f}" for fit in all_fits)
        far = ", ".join(f"{fit.distance:.3f}" for fit in all_fits)
        reason = chosen.reason.split(":")[0]
        told.append(f"| {name} | {len(seen.age_s)} | {seen.deaths} | {reason} | {aic} | {far} |")
    return told


def _kind(fit: FittedLifetime) -> str:
    return type(fit.lifetime).__name__


def as_json(row: Row) -> dict[str, Any]:
    """Return what a fleet's table is made of."""
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
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default="", help="a recording or group; all without it")
    parser.add_argument("--hours", type=float, default=0.0, help="of the job, undisturbed")
    parser.add_argument("--save-s", type=float, default=10.0, help="what a save takes")
    parser.add_argument("--restart-s", type=float, default=60.0, help="what a restart takes")
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, replay, print; return the exit code."""
    asked = parse(arguments)
    try:
        found = fleets(spot_traces(asked.trace) if asked.trace else load_spot_traces())
        fits = {}
        for name, fleet in found.items():
            seen = lives(fleet)
            fits[name] = seen, choose(seen, inf)
        rows = [measured(name, fleet, asked) for name, fleet in found.items() if _losses(fleet)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps([as_json(row) for row in rows]))
        return 0
    print("\n".join([*fit_lines(fits), *(line for row in rows for line in ["", *lines(row)])]))
    return 0


def _losses(fleet: Sequence[SpotTrace]) -> bool:
    """Return whether the first half has any, so that there is something to fit."""
    return machines([trace.part(0.0, 0.5) for trace in fleet]).lives().deaths > 0


if __name__ == "__main__":
    raise SystemExit(main())
