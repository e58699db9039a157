"""Compare step times of real, throttled workers with those of the simulator.

    python benchmarks/fidelity.py [--speeds 1,0.5,0.2 ...] [--rounds 8] [--out results.json]

For each mix of speeds, throttled processes calibrate, train some steps with the equal split,
calibrate again, train some steps under `adaptive`, and so on (`fidelity_ranks.py`). The simulator
predicts each block from the calibrations before and after it. It gets curves through their mean
times, their communication time and, as noise, the differences between successive calibrated steps.
It gets nothing from the steps that it predicts. Each policy trains 40 steps before the first block.

The error is that of the mean step over all rounds. If the speed of the machine itself changes, as
on shared machines, neighbouring blocks and calibrations change equally. The remainder shows in the
standard error of the rounds' errors, and in the drift, the relative difference between the slowest
and the fastest calibration of a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evenstride.core.policies import policy_from_spec
from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import Curve, mean_curves, true_model
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, run
from evenstride.lab.processes.speeds import Speeds, parse_speeds
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.scenario.scenario_model import Scenario

Row = dict[str, Any]

MIXES = ("1,0.5", "1,0.25", "0.7,0.7", "1,0.5,0.2", "0.8,0.4,0.4", "0.6,0.6,0.3,0.2")
POLICIES = ("uniform", "adaptive")
COLD_STEPS = 40  # of each policy before the first block
SIZE_S = 0.5  # measuring time per size in a calibration
SEEDS = 3
RANKS = Path(__file__).with_name("fidelity_ranks.py")
NOT_OURS = {"EVENSTRIDE_TRACE": "", "EVENSTRIDE_POLICY": "", "EVENSTRIDE_MAX_STEPS": ""}


def run_mix(speeds: Speeds, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run one mix of workers and return their measurements."""
    folder.mkdir(parents=True)
    plan, found = folder / "schedule.json", folder / "report.json"
    schedule = {"policies": POLICIES, "cold_steps": COLD_STEPS, "rounds": rounds, "steps": steps}
    plan.write_text(json.dumps({**schedule, "size_s": SIZE_S}))
    launch = Launch((str(RANKS), str(plan), str(found)), speeds, environment=NOT_OURS)
    limits, _ = open_limits(len(speeds))
    try:
        run(launch, limits, folder)
    finally:
        limits.close()
    report: dict[str, Any] = json.loads(found.read_text())
    return report


def judged(mix: str, report: dict[str, Any]) -> list[Row]:
    """Return the measured and the predicted mean step of each policy."""
    calibrations = [curves(one) for one in report["calibrations"]]
    spent_s = [sum(sum(curve.values()) for curve in one) for one in calibrations]
    rows = []
    for first, policy in enumerate(POLICIES):
        real_s, simulated_s = [], []
        for block in range(first, len(report["blocks"]), len(POLICIES)):
            real_s.append(float(np.mean(report["blocks"][block])))
            simulated_s.append(simulated_step_s(scenario(mix, report, block), policy))
        errors = np.array(simulated_s) / np.array(real_s) - 1.0
        rows.append(
            {
                "speeds": mix,
                "policy": policy,
                "real_s": float(np.mean(real_s)),
                "simulated_s": float(np.mean(simulated_s)),
                "error": float(np.mean(simulated_s) / np.mean(real_s) - 1.0),
                "standard_error": float(errors.std(ddof=1) / np.sqrt(len(errors))),
                "drift": max(spent_s) / min(spent_s) - 1.0,
            }
        )
    return rows


def curves(calibration: dict[str, Any]) -> list[Curve]:
    """Return the mean step of each worker in seconds at each size."""
    mine = calibration["steps_s"]
    return [{size: float(np.mean(steps_s)) for size, steps_s in worker} for worker in mine]


def noise(report: dict[str, Any], worker: int) -> float:
    """Return the relative scatter of a worker's calibrated steps.

    It uses differences between successive steps, because drift of the machine affects all of them
    equally. It uses their median, because rare outliers are in the mean times already.
    """
    apart = [
        np.abs(np.diff(steps_s)) / np.mean(steps_s)
        for calibration in report["calibrations"]
        for _, steps_s in calibration["steps_s"][worker]
    ]
    # For normal values, the median difference is 0.6745 times sqrt(2) standard deviations.
    return min(float(np.median(np.concatenate(apart))) / (0.6745 * 2**0.5), 1.0)


def scenario(mix: str, report: dict[str, Any], block: int) -> Scenario:
    """Return the scenario that the calibrations before and after a block describe."""
    around = report["calibrations"][block : block + 2]
    model = true_model(mean_curves(*(curves(one) for one in around)))
    workers = len(model)
    groups = [
        {
            "name": f"worker{k}",
            "fixed_s": float(model.fixed_s[k]),
            "samples_per_s": float(1.0 / model.per_sample_s[k]),
            "noise": noise(report, k),
        }
        for k in range(workers)
    ]
    # A ring has 2 (W - 1) messages. Only their sum matters here.
    latency_s = float(np.mean([one["communication_s"] for one in around])) / (2 * (workers - 1))
    plain = {
        "name": mix.replace(",", "-"),
        "global_batch": report["batch"],
        "steps": 2 * COLD_STEPS,
        "workers": groups,
        "communication": {"latency_s": latency_s},
        "exchange": {"every": "leader", "lag": 2, "cold_lag": 1},
    }
    return Scenario.model_validate(plain)


def simulated_step_s(scenario: Scenario, policy: str) -> float:
    """Return the mean simulated step after the first 40 steps, over some seeds."""
    runs = [
        Simulation(scenario, policy_from_spec(policy), seed).run().real_s for seed in range(SEEDS)
    ]
    return float(np.mean([run[COLD_STEPS:] for run in runs]))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit if there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speeds", nargs="+", default=list(MIXES), help="mixes, such as 1,0.5,0.2")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each policy (8)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a block (16)")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args(arguments)
    try:
        alone = [mix for mix in args.speeds if len(parse_speeds(mix)) < 2]
    except ConfigError as error:
        parser.error(str(error))
    if alone:
        parser.error(f"invalid speeds {alone[0]}: expected at least two workers, such as 1,0.5")
    if args.rounds < 2:
        parser.error(f"invalid --rounds {args.rounds}: expected at least 2 for a standard error")
    if args.steps < 2:
        parser.error(
            f"invalid --steps {args.steps}: expected at least 2, because the first step of a block "
            "is not timed"
        )
    return args


def main() -> None:
    """Compare every mix and print the table."""
    args, rows = parse(), list[Row]()
    print(
        f"{'speeds':18} {'policy':9} {'real':>9} {'simulated':>11} {'error':>7} "
        f"{'std. error':>11} {'drift':>6}"
    )
    with TemporaryDirectory() as place:
        for mix in args.speeds:
            folder = Path(place) / mix.replace(",", "-")
            report = run_mix(parse_speeds(mix), args.rounds, args.steps, folder)
            for row in judged(mix, report):
                rows.append(row)
                print(
                    f"{row['speeds']:18} {row['policy']:9} {row['real_s'] * 1e3:6.1f} ms "
                    f"{row['simulated_s'] * 1e3:8.1f} ms {row['error']:+7.1%} "
                    f"{row['standard_error']:11.1%} {row['drift']:6.0%}",
                    flush=True,
                )
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
