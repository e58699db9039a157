"""Measure what a decision costs the leader, in sorts of 10,000 doubles on the same processor.

    python benchmarks/decisions.py [--workers 8,64,1000,10000] [--rounds 40] [--json]

A decision is one call of `advance` with the measurements of one step of every worker: it learns
the times, and splits the batch. Workers have speeds from 1 to 3 and noise of 2 %. Each decision is
taken twice and timed the second time, and followed by 100 sorts, so that both meet the same
disturbances. Times are processor times of this
thread. The medians of two phases are printed: *fresh* are the first decisions, in which the split
moves; *settled* are those of the second half.

Two sorts are given, because numpy sorts several times faster with vector instructions, which its
stable sort does not use. Decisions gain nothing from these.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.control.advance import advance
from evenstride.core.control.events import Exchanged, FleetFormed, OpeningSkipped
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker, as_array
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements

BATCH = 32  # per worker
NOISE, FIXED_S, SAMPLE_S = 0.02, 0.01, 1e-3
FRESH = 8  # first decisions
SORTED, SORTS = 10_000, 100


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of some decisions."""

    phase: str
    decision_s: float
    sorts: float  # as a fraction of 100 of numpy's sorts
    stable_sorts: float  # and of 100 stable ones
    moves: float  # part of the decisions that moved the split


def taken_s(do: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began_s = time.thread_time()
    do()
    return time.thread_time() - began_s


def _sort(values: FloatArray) -> None:
    for _ in range(SORTS):
        np.sort(values)


def _sort_stably(values: FloatArray) -> None:
    for _ in range(SORTS):
        np.sort(values, kind="stable")


def measure(workers: int, rounds: int, seed: int = 0) -> list[Cost]:
    """Return the costs of fresh and of settled decisions for a number of workers."""
    dice, values = np.random.default_rng(seed), np.random.default_rng(1).random(SORTED)
    formed = FleetFormed(0, 0, BATCH * workers, tuple(Worker(f"m/{k}") for k in range(workers)))
    control, verdict = advance(Control(policy_from_spec("adaptive")), formed)
    control, _ = advance(control, OpeningSkipped(0))
    shares, per_sample_s = verdict.shares or (), SAMPLE_S * dice.uniform(1.0, 3.0, workers)
    found: list[tuple[float, float, float, bool]] = []
    for step in range(rounds):
        at, each = as_array(shares), np.arange(workers)
        busy_s = (FIXED_S + per_sample_s * at) * (1 + NOISE * dice.standard_normal(workers))
        seen = Measurements(
            each,
            at,
            np.full(workers, step),
            np.ones(workers, np.int64),
            busy_s,
            busy_s.max() - busy_s,
            modelled=np.full(workers, step > 0),
        )
        event = Exchanged(step + 1, step + 2, seen)
        advance(control, event)  # the sorts have emptied the caches
        began_s = time.thread_time()
        control, verdict = advance(control, event)
        decision_s = time.thread_time() - began_s
        sort_s, stable_s = (taken_s(partial(do, values)) for do in (_sort, _sort_stably))
        found.append((decision_s, sort_s, stable_s, verdict.shares is not None))
        shares = verdict.shares or shares
    phases = {"fresh": found[1 : FRESH + 1], "settled": found[len(found) // 2 :]}
    return [
        Cost(
            phase,
            median(one[0] for one in some),
            median(one[0] / one[1] for one in some),
            median(one[0] / one[2] for one in some),
            sum(one[3] for one in some) / len(some),
        )
        for phase, some in phases.items()
    ]


def main() -> None:
    """Measure each number of workers and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="8,64,1000,10000", help="numbers, with commas")
    parser.add_argument("--rounds", type=int, default=40, help="decisions of each")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    found = {}
    for workers in map(int, args.workers.split(",")):
        found[workers] = measure(workers, args.rounds)
        if args.json:
            continue
        for cost in found[workers]:
            print(
                f"{workers:6} workers, {cost.phase:8}{cost.decision_s * 1e3:7.2f} ms"
                f"{cost.sorts:7.3f} of 100 sorts{cost.stable_sorts:7.3f} of 100 stable ones, "
                f"{cost.moves:4.0%} moves",
                flush=True,
            )
    if args.json:
        print(json.dumps({n: [asdict(cost) for cost in costs] for n, costs in found.items()}))


if __name__ == "__main__":
    main()
