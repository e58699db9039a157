"""Show where adaptive could lose: tables over the classes of difficult clusters.

    python benchmarks/controller.py [--table first-steps,waves,...] [--seeds 3] [--out tables.json]

| table | what is hard |
|---|---|
| first-steps | the first step at each new share takes longer, as with compilers and autotuners |
| waves | the time of a share is a staircase, and its quantum is unknown, or declared |
| cliffs | beyond a share, the whole step takes several times as long |
| noise | equal workers under noise: plain, correlated, heavy-tailed, common to all |
| periodic | two of eight workers run at half speed half of the time, at some lag |
| drift | speeds that never stand still, and the scenarios that must not become worse for them |
| calm | scenarios in which nothing goes wrong: what carefulness costs |
| stuck | the first step is not modelled and the second is far too slow; runs that never recover |

Each line is one scenario, with means over the seeds. Noise-free and real figures are efficiencies:
the time of the best split at each step, divided by the policy's. `fixed` is the best fixed split,
found with knowledge of all speeds. `informed` knows the true times after every step. Real times
contain noise and the cost of new shares. `vs equal` is the real time of the equal split divided by
that of adaptive, less 1, and `worst` its least value over the seeds. `of best` is adaptive's real
efficiency divided by the best of the other three. A dash means that there is no such figure. The
exit code is 2 if an argument is invalid, and else 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.fleet import Fleet, FloatArray, IntArray
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.builtin_scenarios import SCENARIOS
from evenstride.sim.scenario.scenario_file import load_scenario
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.oracle import best_split, equal_multiples
from evenstride.sim.scoring.suite import ScoredScenario

OURS, EQUAL = "adaptive", "uniform"
PROCESSES, STEPS, STUCK_RUNS = 2, 300, 100

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table."""

    table: str
    name: str
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Line:
    """Mean figures of one case over its seeds."""

    table: str
    name: str
    noise_free: dict[str, float]  # efficiency by policy: adaptive, uniform, informed, fixed
    real: dict[str, float]  # the same with noise and the cost of new shares
    worst_real: float  # adaptive's real time: least quotient of the equal split's and its own
    moves: float  # changes of the split under adaptive


def _kind(rate: float, count: int = 1, **more: Any) -> Plain:
    return {"name": f"at {rate:g}", "samples_per_s": rate, "count": count, **more}


def _made(workers: Sequence[Plain], batch: int, lag: int = 1, **more: Any) -> Scenario:
    plain = {"name": "made", "workers": list(workers), "global_batch": batch, "steps": STEPS}
    return Scenario.model_validate({**plain, "exchange": {"lag": lag}, **more})


def first_steps() -> Iterator[Case]:
    for speeds in ("equal", "20:1"):
        for extra_s in (0.0, 0.05, 0.2, 0.5, 2.0):
            more = {"fixed_s": 0.01, "noise": 0.03, "new_share_s": extra_s}
            slow = [_kind(2000, 2, **more), _kind(100, 6, **more)]
            workers = [_kind(1000, 8, **more)] if speeds == "equal" else slow
            half = {"kind": "step", "at": 100, "workers": 0, "speed": 0.5}
            made = _made(workers, 512, lag=3, events=[half])
            yield Case("first-steps", f"{speeds}, one halves, {extra_s:g} s", made)


def waves() -> Iterator[Case]:
    near, far = (1.0, 0.99, 1.01, 1.02), (2.0, 1.5, 1.0)
    for name, speeds in (("within 3 %", near), ("2 : 1.5 : 1", far)):
        for m in (1, 2, 4, 8, 16):
            for quantum in (None, 32):
                more: Plain = {"noise": 0.01, "wave": 32, "quantum": quantum}
                workers = [_kind(1000 * speed, **more) for speed in speeds]
                known = "declared" if quantum else "unknown"
                made = _made(workers, 32 * m * len(speeds))
                yield Case("waves", f"{name}, {m} waves, quantum {known}", made)


def cliffs() -> Iterator[Case]:
    """The fast workers' proportional share lies beyond the cliff, the equal one does not."""
    for factor in (2.0, 3.0, 5.0, 10.0, 20.0):
        for at in (68, 66):
            more = {"noise": 0.02, "cliff_at": at, "cliff_factor": factor}
            workers = [_kind(1150, 4, **more), _kind(1000, 4, **more)]
            yield Case("cliffs", f"x {factor:g} beyond {at} of 64", _made(workers, 512))


NOISES: dict[str, Plain] = {
    "plain": {},
    "correlated 0.9": {"noise_correlation": 0.9},
    "heavy tail (t, 3)": {"noise_tail": 3.0},
    "half common": {"noise_common": 0.5},
}


def noise() -> Iterator[Case]:
    for name, more in NOISES.items():
        for size in (4, 8, 64):
            for part in (0.1, 0.15, 0.2, 0.3) if name == "plain" else (0.15, 0.3):
                workers = [_kind(1000, size, fixed_s=0.01, noise=part, **more)]
                yield Case("noise", f"{name}, W {size}, {part:.0%}", _made(workers, 64 * size))


def periodic() -> Iterator[Case]:
    for on in (1, 8, 15, 40):
        for lag in (1, 3, 8, 20):
            event = {"kind": "periodic", "at": 0, "workers": [0, 1], "speed": 0.5, "period": 2 * on}
            workers = [_kind(1000, 8, fixed_s=0.01, noise=0.02)]
            yield Case("periodic", f"on {on}, lag {lag}", _made(workers, 512, lag, events=[event]))


def drift() -> Iterator[Case]:
    workers = [_kind(1000, 8, fixed_s=0.01, noise=0.03)]
    walk = {"kind": "walk", "at": 0, "workers": "all"}
    thermal = {"kind": "wave", "at": 0, "workers": "all", "speed": 0.7, "period": 200}
    for spread in (0.005, 0.02):
        yield Case(
            "drift",
            f"random walk of {spread:.1%} per step",
            _made(workers, 512, events=[{**walk, "spread": spread}]),
        )
    apart = {**thermal, "phases": "separate"}
    yield Case("drift", "thermal waves of 200 steps", _made(workers, 512, events=[apart]))
    for name, lag in (("slow-ramp", 1), ("load-20110303", 1), ("load-20110322", 1)):
        yield from _builtin("drift", name, lag)


def calm() -> Iterator[Case]:
    for name, lag in (("reference", 1), ("reference", 8), ("slow-worker-swap", 1)):
        yield from _builtin("calm", name, lag)
    yield from _builtin("calm", "unequal-noise", 1)
    yield from _builtin("calm", "equal-8", 1)


def _builtin(table: str, name: str, lag: int) -> Iterator[Case]:
    try:
        made = load_scenario(SCENARIOS / f"{name}.yaml", {"exchange.lag": lag})
    except ScenarioError:  # its recording is missing
        return
    yield Case(table, f"{name}, lag {lag}", made)


TABLES = {
    make.__name__.replace("_", "-"): make
    for make in (first_steps, waves, cliffs, noise, periodic, drift, calm)
}
STUCK = "stuck"


def best_fixed(scenario: Scenario, seed: int) -> tuple[int, ...] | None:
    """Return the fixed split that takes the least noise-free time over the whole run.

    ``None`` if the fleet changes. The search begins with the best split of each step, and moves
    samples between two workers as long as that helps.
    """
    timeline, cluster = Timeline(scenario, seed), Cluster(scenario, seed)
    if timeline.moves:
        return None
    begins = (0, *timeline.changes)
    weights = np.array([end - begin for begin, end in pairwise((*begins, scenario.steps))])
    here = timeline.present(0)
    speeds = np.array([timeline.speed(step)[here] for step in begins])
    fleet = Fleet(tuple(cluster.workers[k] for k in here), scenario.global_batch)
    curves = cluster.usual.of(here)

    def total_s(shares: IntArray) -> float:
        return float(weights @ replace(curves, speed=speeds).at(shares).max(axis=1))

    some = np.unique(np.linspace(0, len(speeds) - 1, 12).astype(int))
    starts = [best_split(curves.at_speed(speeds[row]), fleet) for row in some]
    starts += [best_split(curves.at_speed(weights @ speeds / weights.sum()), fleet)]
    start = min([equal_multiples(fleet), *starts], key=total_s)
    if len(speeds) == 1:
        return tuple(start.tolist())
    return tuple(_descended(start, total_s, fleet).tolist())


def _descended(shares: IntArray, total_s: Any, fleet: Fleet) -> IntArray:
    """Move samples between workers as long as the total time falls."""
    least_s, amount = total_s(shares), max(1, int(shares.max()) // 8)
    while amount:
        found = False
        for giver in range(len(shares)):
            for taker in range(len(shares)):
                moved = shares.copy()
                moved[giver] -= amount
                moved[taker] += amount
                if moved[giver] < fleet.lower[giver] or moved[taker] > fleet.upper[taker]:
                    continue
                if giver != taker and (now_s := total_s(moved)) < least_s * (1 - 1e-9):
                    shares, least_s, found = moved, now_s, True
        amount = amount if found else amount // 2
    return shares


def perform(task: tuple[Case, int]) -> Line:
    """Simulate a case under all its seeds."""
    case, seeds = task
    lines = [_one(case, seed) for seed in range(seeds)]

    def mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: float(np.mean([each[name] for each in figures])) for name in figures[0]}

    return Line(
        case.table,
        case.name,
        mean([line.noise_free for line in lines]),
        mean([line.real for line in lines]),
        min(line.worst_real for line in lines),
        float(np.mean([line.moves for line in lines])),
    )


def _one(case: Case, seed: int) -> Line:
    stage = ScoredScenario.of(case.scenario, seed)
    ours, track = stage.run(OURS)
    equal, _ = stage.run(EQUAL)
    noise_free = {OURS: ours.efficiency_mean, EQUAL: equal.efficiency_mean}
    real = {OURS: ours.efficiency, EQUAL: equal.efficiency}
    noise_free["informed"], real["informed"] = ours.informed, ours.informed_real
    fixed = best_fixed(case.scenario, seed)
    if fixed is not None:
        row, _ = stage.run("static:" + ",".join(map(str, fixed)))
        noise_free["fixed"], real["fixed"] = row.efficiency_mean, row.efficiency
    against = ours.efficiency / equal.efficiency
    return Line(case.table, case.name, noise_free, real, against, float(len(track.decisions)))


class BadStart(Simulation):
    """A run whose first step says nothing about speed, as after the start of a real run."""

    def _measured(self, cpu_load: FloatArray) -> Measurements:
        measured = super()._measured(cpu_load)
        if measured.first_step.min() > 0:
            return measured
        return Measurements.of(
            replace(seen, modelled=seen.first_step > 0 and seen.modelled) for seen in measured
        )


def stuck(number: int) -> int | None:
    """Return the steps to 95 % of a run with a bad start; ``None`` if it never gets there."""
    rng = np.random.default_rng([29, number])
    size = int(rng.choice([2, 3, 4, 8]))
    more: Plain = {
        "fixed_s": 0.01,
        "noise": 0.03,
        "new_share_s": float(rng.choice([0.0, 0.0, 0.3])),
    }
    workers = [_kind(float(rate), **more) for rate in 1000 / rng.uniform(1, 5, size)]
    slowed = rng.choice(size, size=int(rng.integers(1, size + 1)), replace=False).tolist()
    event = {"kind": "step", "at": 1, "until": int(rng.integers(2, 4)), "workers": slowed}
    event["speed"] = 1.0 / float(rng.uniform(10, 60))
    made = _made(workers, 64 * size, int(rng.choice([1, 3])), events=[event])
    stage = ScoredScenario.of(made, number)
    track = BadStart(made, policy_from_spec(OURS), number, stage.timeline).run()
    return stage.row(OURS, track).steps_to_95_cold


def head() -> str:
    names = "".join(f"{name:>10}" for name in (OURS, EQUAL, "informed", "fixed"))
    return f"{'':44}{names} |{names} |  vs equal     worst  of best  moves"


def text(line: Line) -> str:
    """Return the line of a case."""

    def cells(figures: dict[str, float]) -> str:
        known = (figures.get(name) for name in (OURS, EQUAL, "informed", "fixed"))
        return "".join(f"{'-' if value is None else f'{value:.3f}':>10}" for value in known)

    ahead = line.real[OURS] / line.real[EQUAL] - 1.0
    of_best = line.real[OURS] / max(value for name, value in line.real.items() if name != OURS)
    return (
        f"{line.name:44}{cells(line.noise_free)} |{cells(line.real)} |"
        f"{ahead:>+10.2%}{line.worst_real - 1:>+10.2%}{of_best:>9.3f}{line.moves:>7.1f}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: a table is unknown, or there is no seed.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--table", default=",".join([*TABLES, STUCK]), help="tables to print")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--out", type=Path, help="file for all lines, as JSON")
    args = parser.parse_args(arguments)
    args.tables = args.table.split(",")
    unknown = [name for name in args.tables if name not in {*TABLES, STUCK}]
    if unknown:
        known = ", ".join([*TABLES, STUCK])
        raise ConfigError(f"invalid --table {unknown[0]!r}: expected some of {known}")
    if args.seeds < 1:
        raise ConfigError(f"invalid --seeds {args.seeds}: expected at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and write. Return the exit code."""
    try:
        args = parse(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    lines, result = list[Line](), dict[str, Any]()
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for name in args.tables:
            if name == STUCK:
                found = pool.map(stuck, range(STUCK_RUNS))
                result[STUCK] = found
                print(f"\n{STUCK}: {found.count(None)} of {STUCK_RUNS} runs never reach 95 %")
                continue
            print(f"\n{name}, {args.seeds} seeds; noise-free | real time\n{head()}")
            for line in pool.imap(perform, [(case, args.seeds) for case in TABLES[name]()]):
                print(text(line), flush=True)
                lines.append(line)
    print(f"\n{time.monotonic() - began_s:.0f} s")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result["lines"] = [asdict(line) for line in lines]
        args.out.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
