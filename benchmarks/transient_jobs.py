"""Replay a bag of jobs on recorded spot machines: failures, and cost against on-demand machines.

    python benchmarks/transient_jobs.py [--only TEXT] [--hours H] [--save-min M] [--json]

Each recording has two halves. A model of lifetimes is fitted to the first halves of its group. The
bag runs on one machine at a time, and a new machine lives as long as the next one in the second
half. The first is chosen at random. Before a new machine works, it takes `--start-s` seconds, which
are paid. A killed job starts again from its last save, which took `--save-s` seconds. Ways to place
jobs:

    new       a new machine for each job
    any       each machine takes jobs in order until it is lost, as with a constant rate
    placed    `evenstride.core.reliability.place` chooses the job, or gives the machine back

Lengths of jobs are uniform from a quarter to seven quarters of `--hours`. Costs are machine time at
the spot price divided by useful time at the on-demand price, by the catalogue of the type in its
region. Prices are of other years than the recordings. "Failed" is the part of attempts that ended
by a loss; "overhead" is paid time per useful time, less 1. The group "bathtub" is no recording:
lives are drawn from the published curve with a limit of 24 h, at a price of 1/5.

The replay neglects waits for a machine, and that losses come together. EVENSTRIDE_DATA is the
folder of recordings and catalogue.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.reliability import Bathtub, Lifetime, Lives, choose, place
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue
from evenstride.sim.scenario.recordings import SpotTrace, load_spot_traces, machines

WAYS = ("new", "any", "placed")
HOUR_S = 3600.0
FEWEST = 5  # lives in a half
TYPES = {  # of the recorded names; the one with 64 processors is a guess
    "v100_1": "p3.2xlarge",
    "v100_8": "p3.16xlarge",
    "k80_1": "p2.xlarge",
    "k80_8": "p2.8xlarge",
    "intel_64": "m5.16xlarge",
    "c3-88": "c3-highcpu-88",
}
PUBLISHED = Bathtub(a=0.45, tau1_s=HOUR_S, tau2_s=0.8 * HOUR_S, b_s=24 * HOUR_S)
PUBLISHED_PRICE, PUBLISHED_LIVES = 0.2, 200


@dataclass(frozen=True, slots=True)
class Pool:
    """Where machines come from.

    Args:
        lives_s: Lives of machines, one after another.
        price: Spot price divided by the on-demand price.
    """

    lives_s: FloatArray
    price: float


@dataclass(slots=True)
class Bill:
    """The outcome of a bag.

    Args:
        useful_s: Work of all jobs, each counted once.
        paid_s: Time of all machines.
        attempts: Starts of jobs.
        failed: Attempts that ended by a loss.
        machines: Machines that were started.
        given_back: Machines that `place` gave back.
    """

    useful_s: float = 0.0
    paid_s: float = 0.0
    attempts: int = 0
    failed: int = 0
    machines: int = 0
    given_back: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What jobs pay besides their work.

    Args:
        start_s: Time until a new machine works.
        every_s: Work between two saves; infinity for none.
        save_s: Time of a save.
    """

    start_s: float
    every_s: float
    save_s: float

    def takes_s(self, work_s: float) -> float:
        """Return the time of some work and its saves."""
        return work_s + work_s // self.every_s * self.save_s

    def kept_s(self, spent_s: float) -> float:
        """Return how much work is in the last save after some time."""
        saves = spent_s // (self.every_s + self.save_s)
        return saves * self.every_s if saves else 0.0


def run_bag(
    work_s: FloatArray, lives_s: Iterator[float], way: str, model: Lifetime, costs: Costs
) -> Bill:
    """Run all jobs on one machine after another.

    Args:
        work_s: Work of each job in seconds, ``(jobs,)``.
        lives_s: Lives of the machines, in the order of their starts.
        way: One of `WAYS`.
        model: Of lifetimes, for ``placed``.
        costs: Of starts and saves.
    """
    bill, waiting = Bill(useful_s=float(work_s.sum())), work_s.tolist()
    while waiting:
        life_s, age_s = next(lives_s), costs.start_s
        bill.machines += 1
        while waiting and age_s < life_s:
            job = 0
            if way == "placed":
                takes_s = np.array([costs.takes_s(work_s) for work_s in waiting])
                chosen = place(model, age_s, takes_s, costs.start_s)
                if chosen is None and age_s > costs.start_s:
                    bill.given_back += 1
                    break
                job = chosen or 0  # a new machine has to take some job
            bill.attempts += 1
            if age_s + costs.takes_s(waiting[job]) > life_s:
                bill.failed += 1
                waiting[job] -= costs.kept_s(life_s - age_s)
                age_s = life_s
            else:
                age_s += costs.takes_s(waiting.pop(job))
                if way == "new":
                    break
        bill.paid_s += min(age_s, life_s)
    return bill


def replayed(pool: Pool, way: str, model: Lifetime, args: argparse.Namespace) -> list[Bill]:
    """Run a bag for each seed; all ways have the same jobs and the same machines."""
    costs, bills = Costs(args.start_s, 60.0 * args.save_min or np.inf, args.save_s), []
    for seed in range(args.seeds):
        random = np.random.default_rng(seed)
        work_s = args.hours * HOUR_S * random.uniform(0.25, 1.75, args.jobs)
        lives_s = np.roll(pool.lives_s, -random.integers(len(pool.lives_s)))
        longest_s = min(work_s.max(), costs.every_s)
        if costs.start_s + longest_s >= lives_s.max():
            raise ConfigError(
                f"no machine of the recording lives for {longest_s / HOUR_S:.3g} h of work after "
                f"its start of {costs.start_s:g} s; expected shorter --hours, or --save-min"
            )
        bills.append(run_bag(work_s, _endless(lives_s), way, model, costs))
    return bills


def _endless(lives_s: FloatArray) -> Iterator[float]:
    while True:
        yield from lives_s.tolist()


def groups() -> dict[str, tuple[Lives, list[Pool]]]:
    """Return the lives in the first halves of each group, and a pool for each second half."""
    prices, found = _prices(), dict[str, tuple[list[Lives], list[Pool]]]()
    for trace in load_spot_traces():
        before, after = (machines([trace.part(*half)]) for half in ((0.0, 0.5), (0.5, 1.0)))
        # Ages of those that were up from the start are not known.
        if min((part.came > 0).sum() for part in (before, after)) < FEWEST:
            continue
        seen, pools = found.setdefault(trace.group, ([], []))
        seen.append(before.lives())
        later = after.lives()
        pools.append(Pool(later.age_s[later.lost], price_of(trace, prices)))
    return {name: (_together(seen), pools) for name, (seen, pools) in found.items()}


def _together(seen: Sequence[Lives]) -> Lives:
    ages_s = np.concatenate([part.age_s for part in seen])
    return Lives(ages_s, np.concatenate([part.lost for part in seen]), seen[0].resolution_s)


def _prices() -> dict[tuple[str, str], float]:
    """Return spot price divided by on-demand price, by type and region."""
    folder = Path(os.environ.get("EVENSTRIDE_DATA") or "../shared/data")
    offers = read_catalogue(folder / "cloud-catalog" / "catalog-all-regions.csv.gz").offers
    return {
        (offer.instance_type, offer.region): offer.spot_usd_per_h / offer.usd_per_h
        for offer in offers
        if offer.spot_usd_per_h is not None
    }


def price_of(trace: SpotTrace, prices: dict[tuple[str, str], float]) -> float:
    zone, kind = trace.name.rpartition("/")[2].split("_", 1)
    return prices[TYPES[kind], zone[:-1].rstrip("-")]


def published() -> tuple[Lives, list[Pool]]:
    """Return lives drawn from the published curve."""
    drawn = PUBLISHED.quantile_s(np.random.default_rng(0).random((2, PUBLISHED_LIVES)))
    seen = Lives(np.maximum(drawn[0], 1.0), np.ones(PUBLISHED_LIVES, dtype=bool), 1.0)
    return seen, [Pool(drawn[1], PUBLISHED_PRICE)]


def measured(seen: Lives, pools: Sequence[Pool], args: argparse.Namespace) -> dict[str, Any]:
    """Return the model of a group, and the outcome of each way."""
    chosen = choose(seen)
    ways = {}
    for way in WAYS:
        bills = [(p.price, b) for p in pools for b in replayed(p, way, chosen.fit.lifetime, args)]
        useful_s = sum(bill.useful_s for _, bill in bills)
        total = {name: sum(getattr(b, name) for _, b in bills) for name in Bill.__slots__}
        ways[way] = {
            "failed_part": total["failed"] / total["attempts"],
            "overhead": total["paid_s"] / useful_s - 1.0,
            "cost": sum(price * bill.paid_s for price, bill in bills) / useful_s,
            **total,
        }
    return {"reason": chosen.reason, "model": asdict(chosen.fit.lifetime), "ways": ways}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="groups whose names contain this text")
    parser.add_argument("--hours", type=float, default=1.0, help="mean length of a job")
    parser.add_argument("--jobs", type=int, default=100, help="jobs of a bag")
    parser.add_argument("--save-min", type=float, default=0.0, help="work between saves; 0: none")
    parser.add_argument("--save-s", type=float, default=10.0, help="time of a save")
    parser.add_argument("--start-s", type=float, default=120.0, help="until a machine works")
    parser.add_argument("--seeds", type=int, default=20, help="bags for each recording")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    if (
        min(args.hours, args.jobs, args.seeds) <= 0
        or min(args.save_min, args.save_s, args.start_s) < 0
    ):
        parser.error("expected --hours, --jobs and --seeds above 0, and no time below 0")
    return args


def lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Return the table."""
    yield "| recording | " + " | ".join(f"{w}: failed | overhead | cost" for w in WAYS) + " |"
    yield "|---|" + "--:|" * 3 * len(WAYS)
    for name, row in rows.items():
        figures = (
            f"{way['failed_part']:.1%} | {way['overhead']:.0%} | {way['cost']:.2f}"
            for way in row["ways"].values()
        )
        yield f"| {name} | " + " | ".join(figures) + " |"
    yield from (f"{name}: {row['reason']}" for name, row in rows.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, replay and print. Return the exit code."""
    args = parse(arguments)
    try:
        found = {**groups(), "bathtub": published()}
        rows = {name: measured(*found[name], args) for name in found if args.only in name}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(rows) if args.json else "\n".join(lines(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
