"""Compare adaptive with other policies in randomly generated scenarios.

    python benchmarks/unseen.py [--first 0] [--count 120] [--policies P,Q,...] [--out rows.json]

Each number generates one scenario, which is always the same. It has 2 to 24 workers of up to four
kinds, and steps of some milliseconds to seconds. It has random noise, spikes, floors, saturation
and largest shares, and up to three events. Exchanges take place after each step, every five steps
or as the leader decides, and the lag is 1, 3 or 8. The authors of the policy also wrote the suite.
Random scenarios reveal rules that fit only the suite.

Each scenario prints one line: the lead of adaptive over the best other policy, the name of that
policy, and the events. `behind` marks a deficit of more than 1 %. Below, the benchmark prints the
mean and the number of deficits. The exit code is 2 if no scenario could be simulated, and else 0.
Some deficits are expected, because the result of one run of 300 steps is partly random.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.cli.arguments import split_policies
from evenstride.core.policies import policy_from_spec
from evenstride.errors import ConfigError
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario, ScoreRow

OURS = "adaptive"
OTHERS = "dynamic-batching,lb-bsp-cpu,lb-bsp-cpu:predictor=ema,uniform,dbs:epoch_steps=10"
SIZES = (2, 3, 4, 6, 8, 12, 16, 24)
PROCESSES, STEPS, BEHIND = 2, 300, -0.01

Plain = dict[str, Any]
Rng = np.random.Generator


def scenario(number: int) -> Scenario:
    """Return the scenario with a number."""
    rng = np.random.default_rng([2026, number])
    size, share = int(rng.choice(SIZES)), int(rng.choice([8, 32, 64, 128]))
    rate = _between(rng, 100, 5000)
    exchange = {"every": [1, 1, 5, "leader"][rng.integers(4)], "lag": int(rng.choice([1, 3, 8]))}
    latency_s = rng.choice([0.0, 0.3]) * rng.random() * share / rate / (2 * size)
    return Scenario.model_validate(
        {
            "name": f"unseen-{number}",
            "global_batch": size * share,
            "steps": STEPS,
            "workers": list(_workers(rng, size, share, rate)),
            "communication": {"latency_s": float(latency_s)},
            "events": list(_events(rng, size)),
            "exchange": exchange,
        }
    )


def _between(rng: Rng, low: float, high: float) -> float:
    """Return a random value between two, with a uniform logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _workers(rng: Rng, size: int, share: int, rate: float) -> Iterator[Plain]:
    """Yield the kinds of workers. ``rate`` is the largest possible speed in samples per second."""
    kinds = min(size, int(rng.integers(1, 5)))
    counts = 1 + rng.multinomial(size - kinds, np.full(kinds, 1 / kinds))
    noise, spikes = rng.choice([0.01, 0.02, 0.05, 0.1]), rng.choice([0.0, 0.005, 0.02])
    fixed_s = rng.uniform(0, 0.6) * share / rate
    for number, count in enumerate(counts.tolist()):
        kind: Plain = {
            "name": f"kind{number}",
            "count": count,
            "samples_per_s": rate / _between(rng, 1, rng.choice([2, 6, 15])),
            "fixed_s": float(fixed_s * rng.choice([0.5, 1, 2])),
            "noise": float(noise * rng.choice([1, 1, 2])),
            "spike_rate": float(spikes),
            "spike_factor": float(rng.choice([2, 3, 6])),
        }
        if rng.random() < 0.1:
            kind["floor_s"] = share / rate * rng.uniform(0.3, 1.2)
        if rng.random() < 0.1:
            kind["saturates_at"] = int(max(2, share * rng.uniform(0.7, 2)))
        if rng.random() < 0.15:
            kind["max_share"] = int(max(4, share * rng.uniform(1.1, 3)))
        yield kind


def _events(rng: Rng, size: int) -> Iterator[Plain]:
    left = False
    for _ in range(rng.integers(0, 4)):
        some = rng.choice(size, size=int(rng.integers(1, max(2, size // 2))), replace=False)
        speed, at = _between(rng, 0.25, 2), int(rng.integers(20, 220))
        event: Plain = {"at": at, "workers": some.tolist(), "speed": speed}
        match rng.choice(["step", "ramp", "periodic", "bursty", "leave"]):
            case "step":
                until = at + int(rng.integers(5, 70))
                yield event | {"kind": "step"} | ({"until": until} if rng.random() < 0.5 else {})
            case "ramp":
                yield event | {"kind": "ramp", "steps": int(rng.integers(5, 60))}
            case "periodic":
                yield event | {"kind": "periodic", "period": int(rng.integers(10, 80))}
            case "bursty":
                lengths = {"mean_steps": rng.uniform(5, 40), "mean_gap": rng.uniform(20, 80)}
                yield event | {"kind": "bursty"} | lengths
            case _ if size > 2 and not left:
                left = True
                yield {"kind": "leave", "at": at, "workers": [int(some[0])]}


def perform(task: tuple[int, tuple[str, ...]]) -> tuple[int, tuple[ScoreRow, ...]]:
    """Simulate one scenario with each policy. Return no rows if no split fits its bounds."""
    number, policies = task
    try:
        stage = ScoredScenario.of(scenario(number), number)
    except ConfigError:
        return number, ()
    return number, tuple(stage.run(policy)[0] for policy in policies)


def line(number: int, rows: Sequence[ScoreRow]) -> tuple[str, float]:
    """Return the line of a scenario, and the relative lead of adaptive."""
    ours, *others = rows
    best = max(others, key=lambda row: row.efficiency_mean)
    ahead = ours.efficiency_mean / best.efficiency_mean - 1
    known = scenario(number)
    happens = ", ".join(event.kind for event in known.events) or "nothing"
    text = (
        f"{number:5}  {ahead:+7.2%} of {best.policy:24} {ours.efficiency_mean:.3f}, informed "
        f"{ours.informed:.3f}; {known.size} workers, every {known.exchange.every}, "
        f"lag {known.exchange.lag}: {happens}"
    )
    return text + ("  behind" if ahead < BEHIND else ""), ahead


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: A list is invalid, a policy is unknown, or there is no scenario.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--policies", default=OTHERS, help="policies to compare with")
    parser.add_argument("--out", type=Path, help="file for all rows, as JSON")
    args = parser.parse_args(arguments)
    if args.count < 1 or args.first < 0:
        raise ConfigError(
            f"invalid --first {args.first} or --count {args.count}: expected at least one "
            "scenario, numbered from 0"
        )
    others = [policy for policy in split_policies(args.policies, "--policies") if policy != OURS]
    if not others:
        raise ConfigError(
            f"invalid --policies {args.policies!r}: expected another one than adaptive"
        )
    for policy in others:
        policy_from_spec(policy)
    args.policies = (OURS, *others)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and write. Return the exit code."""
    try:
        args = parse(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    tasks = [(n, args.policies) for n in range(args.first, args.first + args.count)]
    found: list[ScoreRow] = []
    ahead: list[float] = []
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for number, rows in pool.imap(perform, tasks):
            if rows:
                text, part = line(number, rows)
                print(text, flush=True)
                found, ahead = [*found, *rows], [*ahead, part]
    if not ahead:
        print("no scenario has a split within its bounds; give other numbers", file=sys.stderr)
        return 2
    behind = sum(part < BEHIND for part in ahead)
    print(f"{len(ahead)} scenarios: {np.mean(ahead):+.2%} on average, {behind} behind by over 1 %")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"rows": [asdict(row) for row in found]}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
