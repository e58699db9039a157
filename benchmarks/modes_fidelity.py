"""Compare simulated synchronisation modes with the same modes on throttled workers.

    python benchmarks/modes_fidelity.py [--speeds 0.8,0.4,0.16] [--steps 80] [--rounds 2] [--out F]
    python benchmarks/modes_fidelity.py --runs F      # simulates the runs of an earlier call again

The package's own small script runs in the lab in each mode, with equal and with balanced shares.
Before and after each run, all workers calibrate at the same time without waiting for each other.
The simulator predicts a run from the two calibrations around it: from their mean costs and, as
noise, the differences between successive calibrated steps. So a change in the speed of the machine,
as on shared machines, affects both equally.

Two more numbers are fitted: the time of an all-reduce to `bsp`, and that of an update with a
parameter server to `bsp-ps`. They are waiting times of the slowest worker with equal shares, which
waits for no other worker. All other modes, and all modes with balanced shares, are predicted. The
benchmark compares samples per second after the first 40 steps, as means over the rounds.

If a machine drifts by tens of percent per minute, calibrations around a run do not describe the
run. So the table also has a simulation with the workers' own speeds in the run. Its error is that
of the modes, not of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evenstride.cli.arguments import read_modes
from evenstride.cli.lab_output import own_script
from evenstride.core.sync_modes.mode_specs import (
    Asynchronous,
    ParameterServerMode,
    StaleSynchronous,
    SyncMode,
)
from evenstride.lab.comparison.comparison_result import Curve, drift, mean_curves, true_model
from evenstride.lab.comparison.lab_session import LabPlan, Session, Viewer, opened
from evenstride.lab.comparison.sample_script import SAMPLES
from evenstride.lab.comparison.trace_figures import (
    BLOCK_STEPS,
    Rates,
    WorkerRates,
    rates,
    undisturbed_s,
)
from evenstride.lab.processes.speeds import parse_speeds
from evenstride.sim.engine.mode_result import ModeResult
from evenstride.sim.engine.mode_runs import simulate_sync
from evenstride.sim.scenario.scenario_model import (
    Communication,
    Exchange,
    Scenario,
    WorkerGroup,
)
from evenstride.trace.run_log import RunLog

MODES = read_modes("bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed")
POLICIES = ("uniform", "adaptive")
FITTED = (("bsp", "uniform"), ("bsp-ps", "uniform"))
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, and its workers by the calibrations around it.

    Args:
        sync: Synchronisation mode.
        policy: Policy of the shares.
        rates: Measured rates.
        workers: Workers of the simulated cluster.
        drift: Relative change of the workers' speeds during the run.
    """

    sync: str
    policy: str
    rates: Rates
    workers: tuple[WorkerGroup, ...]
    drift: float

    @property
    def waited_s(self) -> float:
        """Communication time: the waiting time per step of the worker that waits for no other."""
        return min(one.waiting * one.period_s for one in self.rates.workers)


@dataclass(frozen=True, slots=True)
class Row:
    """One mode and policy, real and simulated, over all rounds.

    Args:
        sync: Synchronisation mode.
        policy: Policy of the shares.
        real_per_s: Measured samples per second of each round.
        simulated_per_s: Simulated samples per second, from the calibrations around each run.
        own_speed_per_s: Simulated samples per second with the workers' speeds in the run.
        real_staleness: Measured mean staleness of the updates; 0 in synchronous modes.
        simulated_staleness: Simulated mean staleness.
        drift: Largest change of a worker's speed around a run.
    """

    sync: str
    policy: str
    real_per_s: tuple[float, ...]
    simulated_per_s: tuple[float, ...]
    own_speed_per_s: tuple[float, ...]
    real_staleness: float
    simulated_staleness: float
    drift: float

    @property
    def error(self) -> float:
        """Relative error of the simulated speed, over all rounds."""
        return float(np.mean(self.simulated_per_s) / np.mean(self.real_per_s) - 1.0)

    @property
    def own_error(self) -> float:
        """Relative error at the workers' own speeds."""
        return float(np.mean(self.own_speed_per_s) / np.mean(self.real_per_s) - 1.0)

    @property
    def errors(self) -> list[float]:
        """Relative errors of the simulated speed in each round."""
        both = zip(self.simulated_per_s, self.real_per_s, strict=True)
        return [simulated / real - 1.0 for simulated, real in both]

    def line(self) -> str:
        """Return the row as a line of the table."""
        fitted = "fitted" if (self.sync, self.policy) in FITTED else ""
        return (
            f"{self.sync:22}{self.policy:10}{np.mean(self.real_per_s):>8.0f}"
            f"{np.mean(self.simulated_per_s):>11.0f}{self.error:>+8.1%}{self.own_error:>+11.1%}"
            f"{self.real_staleness:>8.2f}{self.simulated_staleness:>8.2f}{self.drift:>8.1%}  "
            f"{' '.join(f'{error:+.1%}' for error in self.errors):18}{fitted}"
        )


def measured(session: Session) -> Iterator[Measured]:
    """Yield each run of a session, calibrated before and after."""
    before = calibrated(session, "calibration-0")
    for repeat in range(session.plan.repeats):
        for mode in session.plan.modes:
            for policy in session.plan.policies:
                found = rates(session.train(policy, repeat, str(mode)))
                after = calibrated(session, f"calibration-{mode}-{policy}-{repeat}")
                run = Measured(
                    str(mode), policy, found, groups(before, after), drift(before[0], after[0])
                )
                before = after
                session.viewer.say(
                    f"{mode} {policy}: {found.samples_per_s:.0f} samples/s, samples "
                    f"{'/'.join(map(str, found.shares))}, drift {run.drift:.1%}"
                )
                yield run


def calibrated(session: Session, name: str) -> tuple[list[Curve], list[float]]:
    """Return the curve of each worker, and the scatter of its steps."""
    curves = session.calibrate(name)
    folder = session.plan.folder / name
    return curves, [scatter(folder / f"worker-{k}.jsonl") for k in range(len(curves))]


def scatter(trace: Path) -> float:
    """Return the relative scatter of the steps of a calibrated worker.

    It is the median difference of successive steps. So drift of the machine does not count, nor do
    rare outliers. Both are in the mean times already.
    """
    kept = [undisturbed_s(seen) for seen in RunLog(trace).observations if seen.modelled]
    apart = [np.abs(np.diff(one)) / np.mean(one) for one in kept if len(one) > 1]
    # For normal values, the median difference is 0.6745 times sqrt(2) standard deviations.
    return min(float(np.median(np.concatenate(apart))) / (0.6745 * 2**0.5), 1.0)


def groups(
    before: tuple[list[Curve], list[float]], after: tuple[list[Curve], list[float]]
) -> tuple[WorkerGroup, ...]:
    """Return the workers by the mean of two calibrations."""
    model = true_model(mean_curves(before[0], after[0]))
    both = zip(model.fixed_s, model.per_sample_s, before[1], after[1], strict=True)
    return tuple(
        WorkerGroup(
            name=f"worker-{k}",
            fixed_s=float(fixed_s),
            samples_per_s=float(1 / sample_s),
            noise=0.5 * (first + second),
        )
        for k, (fixed_s, sample_s, first, second) in enumerate(both)
    )


def fitted_s(runs: Sequence[Measured]) -> tuple[float, float]:
    """Return the times of an all-reduce, and of an update of the slowest worker with a server.

    With equal shares, the slowest worker waits for no other, so its waiting time is communication.
    On one machine, this is mostly work of its own processor, which packs and unpacks messages.
    """
    reduce_s, serve_s = (
        float(np.mean([run.waited_s for run in runs if (run.sync, run.policy) == arm]))
        for arm in FITTED
    )
    return reduce_s, serve_s


def with_handling(workers: Sequence[WorkerGroup], slowest_s: float) -> list[WorkerGroup]:
    """Return the workers with their own time for an update, inverse to their speed."""
    least = min(group.samples_per_s for group in workers)
    return [
        group.model_copy(update={"handling_s": slowest_s * least / group.samples_per_s})
        for group in workers
    ]


def simulated(
    run: Measured, mode: SyncMode, steps: int, fitted: tuple[float, float]
) -> list[ModeResult]:
    """Simulate a run with several seeds, each to the end of the cold steps and to the end."""
    cold = min(BLOCK_STEPS, steps // 2)
    reduce_s, handling_s = fitted
    served = isinstance(mode, ParameterServerMode | Asynchronous | StaleSynchronous)
    latency_s = 0.0 if served else reduce_s / (2 * (len(run.workers) - 1))
    links = Communication(latency_s=latency_s)
    return [
        simulate_sync(
            Scenario(
                name="lab",
                global_batch=run.rates.global_batch,
                steps=length,
                workers=with_handling(run.workers, handling_s),
                communication=links,
                epoch_samples=SAMPLES,
                exchange=Exchange(every="leader"),
            ),
            run.policy,
            mode,
            seed,
        )
        for seed in range(SEEDS)
        for length in (cold, steps)
    ]


def per_s(outcomes: Sequence[ModeResult]) -> float:
    """Return samples per second after the cold steps, over all seeds."""
    samples = sum(o.samples for o in outcomes[1::2]) - sum(o.samples for o in outcomes[::2])
    return samples / (sum(o.time_s for o in outcomes[1::2]) - sum(o.time_s for o in outcomes[::2]))


def at_own_speed(run: Measured) -> Measured:
    """Return a run with the workers' speeds in that run.

    In asynchronous modes, the time that a worker waits for its messages then counts as busy time.
    """
    all_own = zip(run.workers, run.rates.shares, run.rates.workers, strict=True)
    workers = [_as_busy(k, share, one.period_s * (1.0 - one.waiting)) for k, share, one in all_own]
    return replace(run, workers=tuple(workers))


def _as_busy(group: WorkerGroup, share: int, busy_s: float) -> WorkerGroup:
    factor = busy_s / (group.fixed_s + share / group.samples_per_s)
    changed = {
        "fixed_s": group.fixed_s * factor,
        "samples_per_s": group.samples_per_s / factor,
    }
    return group.model_copy(update=changed)


def row(runs: Sequence[Measured], mode: SyncMode, steps: int, fitted: tuple[float, float]) -> Row:
    """Return one mode and policy, real and simulated."""
    free = runs[0].rates.staleness is not None
    outcomes = [simulated(run, mode, steps, fitted) for run in runs]
    within = (fitted[0], 0.0) if free else fitted
    return Row(
        str(mode),
        runs[0].policy,
        tuple(run.rates.samples_per_s for run in runs),
        tuple(map(per_s, outcomes)),
        tuple(per_s(simulated(at_own_speed(run), mode, steps, within)) for run in runs),
        float(np.mean([run.rates.staleness[0] if run.rates.staleness else 0.0 for run in runs])),
        float(np.mean([one[-1].staleness.mean for one in outcomes])) if free else 0.0,
        max(run.drift for run in runs),
    )


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeds", default="0.8,0.4,0.16")
    parser.add_argument("--steps", type=int, default=80, help="steps of each run (80)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode and policy (2)")
    parser.add_argument("--runs", type=Path, help="file of an earlier call's --out")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    return parser.parse_args()


def main() -> None:
    """Run all modes, simulate them, and print the errors."""
    args = parsed()
    if args.runs is not None:
        report = json.loads(args.runs.read_text())
        runs, steps = [again(one) for one in report["runs"]], report.get("steps", args.steps)
    else:
        runs, steps = ran(args), args.steps
    fitted = fitted_s(runs)
    print(f"{'':32}{'samples per second':>19}{'':8}{'at own':>11}{'staleness':>16}")
    print(f"{'mode':22}{'shares':10}{'real':>8}{'simulated':>11}{'error':>8}{'speed':>11}", end="")
    print(f"{'real':>8}{'sim.':>8}{'drift':>8}  {'each round':18}")
    rows = []
    for mode in MODES:
        for policy in POLICIES:
            mine = [run for run in runs if (run.sync, run.policy) == (str(mode), policy)]
            rows.append(row(mine, mode, steps, fitted))
            print(rows[-1].line(), flush=True)
    print(
        f"fitted: an all-reduce {fitted[0] * 1e3:.1f} ms, the slowest worker's update with a "
        f"server {fitted[1] * 1e3:.1f} ms"
    )
    if args.out is not None:
        all_runs = [plain(run) for run in runs]
        found = {"steps": steps, "rows": [asdict(one) for one in rows], "runs": all_runs}
        args.out.write_text(json.dumps(found))


def ran(args: argparse.Namespace) -> list[Measured]:
    """Run all modes in the lab."""
    with TemporaryDirectory() as folder:
        plan = LabPlan(
            command=(own_script(),),
            speeds=parse_speeds(args.speeds),
            policies=POLICIES,
            steps=args.steps,
            repeats=args.rounds,
            changes=(),
            folder=Path(folder),
            calibrate=True,
            modes=MODES,
        )
        viewer = Viewer(say=lambda line: print(line, file=sys.stderr, flush=True))
        with opened(plan, viewer) as session:
            return list(measured(session))


def again(stored: dict[str, Any]) -> Measured:
    """Return a run from the output of `plain`."""
    kept = stored["rates"]
    workers = tuple(WorkerRates(**one) for one in kept["workers"])
    staleness = None if kept["staleness"] is None else tuple(kept["staleness"])
    found = Rates(**{**kept, "workers": workers, "staleness": staleness})
    groups = tuple(WorkerGroup(**one) for one in stored["workers"])
    return Measured(stored["sync"], stored["policy"], found, groups, stored["drift"])


def plain(run: Measured) -> dict[str, object]:
    """Return a run as JSON types."""
    return {
        "sync": run.sync,
        "policy": run.policy,
        "drift": run.drift,
        "workers": [group.model_dump() for group in run.workers],
        "rates": asdict(run.rates),
    }


if __name__ == "__main__":
    main()
