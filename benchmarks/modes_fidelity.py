"""Modes of synchronisation simulated, against the same modes on really slowed workers.

    python benchmarks/modes_fidelity.py [--speeds 0.8,0.4,0.16] [--steps 120] [--out FILE]

The package's own small script runs in the lab in each mode, with equal and with balanced shares.
The simulated cluster has the workers' costs as calibrated, each worker alone. Two numbers more are
fitted, to equal shares alone: a message's latency to `bsp`, a server's update to `bsp-ps`. All else
is predicted: every other mode, and all modes with balanced shares. Samples per second are compared
after the first 40 steps of each run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from evenstride.cli.modes import read_modes
from evenstride.cli.real import own_script
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.speedup import equal_split
from evenstride.core.sync import SyncMode
from evenstride.lab.blocks import BLOCK_STEPS
from evenstride.lab.modes import ModesComparison, run_modes
from evenstride.lab.session import LabPlan, Viewer
from evenstride.lab.speeds import parse_speeds
from evenstride.lab.workload import SAMPLES
from evenstride.sim.outcome import Outcome
from evenstride.sim.scenario import Communication, Exchange, Scenario, WorkerGroup
from evenstride.sim.sync import simulate_sync

MODES = "bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed"
POLICIES = ("uniform", "adaptive")
FITTED = (("bsp", "uniform"), ("bsp-ps", "uniform"))


@dataclass(frozen=True, slots=True)
class Pair:
    """One mode and policy, real and simulated.

    Args:
        sync: the mode.
        policy: of the shares.
        real_per_s: samples per second, mean of the runs.
        simulated_per_s: the same as simulated.
        real_staleness: mean of the updates' staleness; 0 where all wait for all.
        simulated_staleness: the same as simulated.
        shares: at the end of the last real run.
    """

    sync: str
    policy: str
    real_per_s: float
    simulated_per_s: float
    real_staleness: float
    simulated_staleness: float
    shares: tuple[int, ...]

    @property
    def error(self) -> float:
        """By which part the simulated speed is off."""
        return self.simulated_per_s / self.real_per_s - 1.0

    def line(self) -> str:
        """Return the pair as people read it."""
        fitted = "fitted" if (self.sync, self.policy) in FITTED else ""
        return (
            f"{self.sync:22}{self.policy:10}{self.real_per_s:>8.0f}{self.simulated_per_s:>11.0f}"
            f"{self.error:>8.1%}{self.real_staleness:>8.2f}{self.simulated_staleness:>8.2f}  "
            f"{'/'.join(map(str, self.shares)):16}{fitted}"
        )


def cluster(told: ModesComparison, steps: int) -> Scenario:
    """Return the simulated cluster, its links fitted to the runs with equal shares."""
    workers = [
        WorkerGroup(name=f"worker-{k}", samples_per_s=1 / cost.per_sample_s, fixed_s=cost.fixed_s)
        for k, cost in enumerate(told.costs)
    ]
    fleet = Fleet(tuple(Worker(group.name) for group in workers), told.global_batch)
    equal = zip(told.costs, equal_split(fleet), strict=True)
    slowest_s = max(cost.fixed_s + share * cost.per_sample_s for cost, share in equal)
    reduce_s, serve_s = (
        max(told.global_batch / real_rate(told, *arm) - slowest_s, 0.0) for arm in FITTED
    )
    latency_s = reduce_s / (2 * (len(workers) - 1))
    links = Communication(latency_s=latency_s, update_s=max(serve_s - 2 * latency_s, 0.0))
    return Scenario(
        name="lab",
        global_batch=told.global_batch,
        steps=steps,
        workers=workers,
        communication=links,
        epoch_samples=SAMPLES,
        exchange=Exchange(every="leader"),
    )


def real_rate(told: ModesComparison, sync: str, policy: str) -> float:
    """Return the samples per second of a mode under a policy, mean of its runs."""
    runs = told.by_arm()[sync, policy]
    return sum(run.samples_per_s for run in runs) / len(runs)


def simulated(scenario: Scenario, mode: SyncMode, policy: str) -> tuple[float, Outcome]:
    """Return the simulated samples per second after the cold steps, and the whole run."""
    cold_steps = min(BLOCK_STEPS, scenario.steps // 2)
    whole = simulate_sync(scenario, policy, mode)
    cold = simulate_sync(scenario.model_copy(update={"steps": cold_steps}), policy, mode)
    return (whole.samples - cold.samples) / (whole.time_s - cold.time_s), whole


def pairs(told: ModesComparison, scenario: Scenario, modes: tuple[SyncMode, ...]) -> list[Pair]:
    """Return every mode and policy, real and simulated."""
    found = []
    for mode in modes:
        for policy in POLICIES:
            per_s, outcome = simulated(scenario, mode, policy)
            runs = told.by_arm()[str(mode), policy]
            stale = [run.staleness[0] if run.staleness else 0.0 for run in runs]
            real_s = real_rate(told, str(mode), policy)
            mean = sum(stale) / len(stale)
            free = outcome.staleness.mean if runs[-1].staleness else 0.0
            found.append(Pair(str(mode), policy, real_s, per_s, mean, free, runs[-1].shares))
    return found


def parsed() -> argparse.Namespace:
    """Return what is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeds", default="0.8,0.4,0.16")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each mode and policy")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run all modes, simulate them, and print how far the one is from the other."""
    asked = parsed()
    modes = read_modes(MODES)
    with tempfile.TemporaryDirectory() as folder:
        plan = LabPlan(
            command=(own_script(),),
            speeds=parse_speeds(asked.speeds),
            policies=POLICIES,
            steps=asked.steps,
            repeats=asked.repeats,
            changes=(),
            folder=Path(folder),
            calibrate=True,
            modes=modes,
        )
        told = run_modes(plan, Viewer(say=lambda line: print(line, file=sys.stderr, flush=True)))
    scenario = cluster(told, asked.steps)
    found = pairs(told, scenario, modes)
    print(f"{'':32}{'samples per second':>27}{'staleness':>16}")
    print(f"{'mode':22}{'shares':10}{'real':>8}{'simulated':>11}{'off':>8}{'real':>8}{'sim.':>8}")
    print("\n".join(pair.line() for pair in found))
    links = scenario.communication
    print(
        f"latency {links.latency_s * 1e3:.2f} ms, update {links.update_s * 1e3:.2f} ms; speeds "
        f"changed by {told.drift:.1%} between the calibrations"
        + (": disturbed, not to be quoted" if told.disturbed else "")
    )
    if asked.out is not None:
        report = {"pairs": [asdict(pair) for pair in found], "lab": told.to_dict()}
        asked.out.write_text(json.dumps(report))
    return 3 if told.disturbed else 0


if __name__ == "__main__":
    sys.exit(main())
