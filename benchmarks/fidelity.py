"""Does the simulator tell what real runs take? Lab runs beside their simulation.

    python benchmarks/fidelity.py [--speeds 1,0.5,0.2 ...] [--steps 100] [--out results.json]

For each mix of speeds: the lab calibrates the workers before and after, and runs the equal split
and `adaptive` on real, throttled processes. The simulator gets the calibrated curves (the mean of
both calibrations), the scatter of their steps as noise, and the communication that the runs
measured; then it runs the same policies under the same cadence. Mean step times are compared,
without the first 40 steps. Nothing is fitted to the runs that are predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evenstride.core.observation import Measured
from evenstride.core.policies import policy_from_spec
from evenstride.lab.blocks import (
    BLOCK_STEPS,
    leader_steps,
    measured_curve,
    observations,
    run_figures,
)
from evenstride.lab.calibration import mean_curves, true_model
from evenstride.lab.compare import LabPlan, Viewer, run_lab
from evenstride.lab.speeds import parse_speeds
from evenstride.sim.run import Simulation
from evenstride.sim.scenario import Scenario

MIXES = ("1,0.5", "1,0.25", "0.7,0.7", "1,0.5,0.2", "0.8,0.4,0.4", "0.6,0.6,0.3,0.2")
POLICIES = ("uniform", "adaptive")
SCRIPT = Path(__file__).parent.parent / "src" / "evenstride" / "lab" / "workload.py"


def compare(mix: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Run one mix in the lab and in the simulator; return a row for each policy."""
    speeds = parse_speeds(mix)
    plan = LabPlan((str(SCRIPT),), speeds, POLICIES, steps, 1, (), folder, True)
    outcome = run_lab(plan, Viewer(say=lambda line: print(f"    {line}", flush=True)))
    traces = {policy: folder / f"{policy}-1" / "trace.jsonl" for policy in POLICIES}
    communication_s = min(run_figures(trace).communication_s for trace in traces.values())
    scenario = calibrated_scenario(folder, len(speeds), outcome.global_batch, communication_s)
    scenario = scenario.model_copy(update={"steps": steps})
    rows = []
    for policy, trace in traces.items():
        warm = [time_s for step, time_s in leader_steps(trace) if step >= BLOCK_STEPS]
        real_s = float(np.mean(warm))
        simulated_s = simulated_step_s(scenario, policy)
        rows.append(
            {
                "speeds": mix,
                "policy": policy,
                "real_s": real_s,
                "simulated_s": simulated_s,
                "error": simulated_s / real_s - 1.0,
                "drift": outcome.drift,
                "disturbed": outcome.disturbed,
            }
        )
    return rows


def calibrated_scenario(folder: Path, workers: int, batch: int, communication_s: float) -> Scenario:
    """Return the scenario that the calibrations of a lab session describe."""
    traces = [
        [folder / f"calibration-{when}" / f"worker-{k}.jsonl" for k in range(workers)]
        for when in ("before", "after")
    ]
    before, after = ([measured_curve(trace) for trace in some] for some in traces)
    model = true_model(mean_curves(before, after))
    groups = [
        {
            "name": f"worker{k}",
            "fixed_s": float(model.fixed_s[k]),
            "samples_per_s": float(1.0 / model.per_sample_s[k]),
            "noise": noise([some[k] for some in traces]),
        }
        for k in range(workers)
    ]
    # A ring's 2 (W - 1) messages; only their sum matters here.
    latency_s = communication_s / (2 * (workers - 1))
    plain = {
        "name": folder.name,
        "global_batch": batch,
        "workers": groups,
        "communication": {"latency_s": latency_s},
        "exchange": {"every": "leader", "lag": 2, "cold_lag": 1},
    }
    return Scenario.model_validate(plain)


def noise(traces: Sequence[Path]) -> float:
    """Return the scatter of a worker's calibrated steps, in parts."""
    found: list[float] = []
    for trace in traces:
        measured = Measured.of(seen for seen in observations(trace) if seen.modelled)
        found += [float(v) for v in np.sqrt(measured.relative_variance) if np.isfinite(v)]
    return min(median(found), 1.0) if found else 0.0


def simulated_step_s(scenario: Scenario, policy: str, seeds: int = 5) -> float:
    """Return the mean simulated step after the first 40, over some seeds."""
    runs = [
        Simulation(scenario, policy_from_spec(policy), seed).run().real_s for seed in range(seeds)
    ]
    return float(np.mean([run[BLOCK_STEPS:] for run in runs]))


def main() -> None:
    """Compare every mix and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speeds", nargs="+", default=list(MIXES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as place:
        for mix in asked.speeds:
            print(mix, flush=True)
            rows += compare(mix, asked.steps, Path(place) / mix.replace(",", "-"))
    print(f"{'speeds':18} {'policy':9} {'real':>9} {'simulated':>10} {'error':>7} {'drift':>6}")
    for row in rows:
        print(
            f"{row['speeds']:18} {row['policy']:9} {row['real_s'] * 1e3:6.1f} ms "
            f"{row['simulated_s'] * 1e3:7.1f} ms {row['error']:+7.1%} {row['drift']:6.1%}"
            + (" disturbed" if row["disturbed"] else "")
        )
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
