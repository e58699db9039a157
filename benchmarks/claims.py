"""Simulate the clusters of the papers: the figures of docs/records/claims.md.

    python benchmarks/claims.py [--seeds 5] [--only SCENARIO,...] [--json]

Each scenario stands for a cluster of a paper. The benchmark prints its *bound*, and the speed-ups
of the paper's own policy and of `adaptive`. A speed-up is the time of the equal split divided by
that of the policy with the same noise. It is a mean over the seeds and covers the whole run,
including the opening. Costs of a restart are not charged, although the paper's system restarted the
job at every change of the batches.

Further figures: step times on uneven cores divided by those on as many even cores, and how often
Dynamic Batching changes the split. The latter counts changes, from an equal split, until the first
step that takes at most 5 % longer than the best one without noise, and changes after that. It is
repeated with the window of 10 steps of the authors' code, and without a dead-band. There, workers
declare no cores, because the policy would otherwise start from these.

DBS and OmniLearn decide once per epoch, which has 10 and 20 steps in the scenario. They also run
with decisions every 100 steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from evenstride.core.policies import policy_from_spec
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.scenario import builtin_scenarios
from evenstride.sim.scenario.scenario_file import load_scenario
from evenstride.sim.scoring.suite import ScoredScenario

SCENARIOS = builtin_scenarios.SCENARIOS
CORES = ("static:cores", "dynamic-batching", "dynamic-batching:window=10", "adaptive")
GPUS = ("lb-bsp-gpu", "lb-bsp-gpu:version=2018")
FLOPS = ("static", "dynamic-batching", "dynamic-batching:window=10", "adaptive")
MIXES: dict[str, tuple[str, ...]] = {
    "h1": CORES,
    "h2": CORES,
    "h6": CORES,
    "h10": CORES,
    "p100-xeon": FLOPS,
    "t4-p4-1024": (*FLOPS, *GPUS),
    "t4-p4-2048": FLOPS,
    "lb-bsp-cpu-mix": ("lb-bsp-cpu", "adaptive"),
    "dbs-disturbance": ("dbs", "dbs:epoch_steps=100", "adaptive"),
    "omnilearn-schedule": ("omnilearn", "omnilearn:epoch_steps=100", "adaptive"),
    "lbb-four-gpus": (*GPUS, "adaptive"),
}
FROM, TO = ("h1", ("h6", "h10"))
ADJUSTED, NEAR = ("h2", "h6", "h10"), 1.05
ADJUSTING = (
    "dynamic-batching",
    "dynamic-batching:window=10",
    "dynamic-batching:dead_band=0",
)


def speedups(name: str, seeds: int) -> dict[str, float]:
    """Return the bound of a scenario and the speed-ups of its policies."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", {})
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        stage = ScoredScenario.of(scenario, seed)
        for policy in MIXES[name]:
            row = stage.run(policy)[0]
            found.setdefault("bound", []).append(row.bound)
            found.setdefault(policy, []).append(row.speedup)
    return {what: round(float(np.mean(values)), 3) for what, values in found.items()}


def against_equal_cores(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield step times on uneven cores relative to as many even ones (H1, equal split)."""
    even_s = mean_step_s(FROM, "uniform", seeds)
    for name in TO:
        for policy in ("uniform", "dynamic-batching", "adaptive"):
            ratio = mean_step_s(name, policy, seeds) / even_s
            yield {"scenario": name, "policy": policy, "over_h1": round(ratio, 2)}


def mean_step_s(name: str, policy: str, seeds: int) -> float:
    """Return the mean step time in seconds, with noise, over all seeds."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", {})
    runs = [Simulation(scenario, policy_from_spec(policy), seed).run() for seed in range(seeds)]
    return float(np.mean([run.real_s for run in runs]))


def adjustments(name: str, policy: str, seeds: int) -> dict[str, Any]:
    """Return how often a policy changes the split until it is good, and afterwards."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", {})
    undeclared = [group.model_copy(update={"cores": None}) for group in scenario.workers]
    scenario = scenario.model_copy(update={"workers": undeclared})
    until, later = list[int](), list[int]()
    for seed in range(seeds):
        stage = ScoredScenario.of(scenario, seed)
        track = stage.run(policy)[1]
        good = int(np.argmax(track.mean_s <= NEAR * stage.references.oracle_mean_s))
        changes = [move.step <= good for move in track.decisions]
        until.append(sum(changes))
        later.append(len(changes) - sum(changes))
    counts = {"until_good": sorted(until), "later": sorted(later)}
    return {"scenario": name, "policy": policy, **counts}


def show(mixes: dict[str, dict[str, float]], uneven: list[Any], adjusted: list[Any]) -> None:
    """Print all figures."""
    for name, figures in mixes.items():
        print(f"{name:20}" + "".join(f"  {what} {figure:.3f}" for what, figure in figures.items()))
    for row in uneven:
        print(f"{row['scenario']}, {row['policy']}: {row['over_h1']:.2f} of H1's equal split")
    for row in adjusted:
        until, later = (" ".join(map(str, row[when])) for when in ("until_good", "later"))
        print(f"{row['scenario']}, {row['policy']}, each seed: {until} changes, later {later}")


def main() -> None:
    """Simulate all clusters and print the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="scenarios; skips the comparison with even cores")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(MIXES)
    unknown = [name for name in names if name not in MIXES]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}: expected one of {', '.join(MIXES)}")
    mixes = {name: speedups(name, args.seeds) for name in names}
    uneven = [] if args.only else list(against_equal_cores(args.seeds))
    adjusted = [
        adjustments(name, policy, args.seeds)
        for name in ADJUSTED
        if name in names
        for policy in ADJUSTING
    ]
    if args.json:
        found = {"speedups": mixes, "over_equal_cores": uneven, "adjustments": adjusted}
        print(json.dumps(found, indent=1))
    else:
        show(mixes, uneven, adjusted)


if __name__ == "__main__":
    main()
