"""Modes of synchronisation simulated, against the same modes on really slowed workers.

    python benchmarks/modes_fidelity.py [--speeds 0.8,0.4,0.16] [--steps 80] [--rounds 2] [--out F]
    python benchmarks/modes_fidelity.py --runs F      # simulates the runs of an earlier call again

The package's own small script runs in the lab in each mode, with equal and with balanced shares,
and before and after each run every worker is calibrated alone, all at the same time. A run is
predicted from the two calibrations around it: their mean costs, and how much calibrated steps
differ from one to the next as noise. So a machine that changes its own speed meanwhile, as shared
ones do, changes both alike. Two numbers more are fitted, to the waits of the slowest worker by
equal shares, which waits for no other: an all-reduce to `bsp`, and an update with a server to
`bsp-ps`. All else is predicted: every other mode, and all modes with
balanced shares. Samples per second are compared after the first 40 steps of each run, and the mean
over the rounds; their scatter is beside it.

Where a machine drifts by tens of per cent from one minute to the next, calibrations around a run
do not tell what it was like during the run. So beside the forecast there is what the simulator
makes of the run with the workers' own speeds in it: what is left is the modes', not the machine's.
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
from evenstride.sim.scenario.scenario_model import Communication, Exchange, Scenario, WorkerGroup
from evenstride.trace.run_log import RunLog

MODES = read_modes("bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed")
POLICIES = ("uniform", "adaptive")
FITTED = (("bsp", "uniform"), ("bsp-ps", "uniform"))
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, and its workers as calibrated around it.

    Args:
        sync: the mode.
        policy: of the shares.
        rates: that it came to.
        workers: of the cluster that is simulated in its place.
        drift: by how much the workers' speeds changed meanwhile.
    """

    sync: str
    policy: str
    rates: Rates
    workers: tuple[WorkerGroup, ...]
    drift: float

    @property
    def waited_s(self) -> float:
        """What the worker that waits for no other waited in each step: communication."""
        return min(one.waiting * one.period_s for one in self.rates.workers)


@dataclass(frozen=True, slots=True)
class Row:
    """One mode and policy, real and simulated, over all rounds.

    Args:
        sync: the mode.
        policy: of the shares.
        real_per_s: samples per second, of each round.
        simulated_per_s: the same as simulated, from the calibrations around each.
        own_speed_per_s: the same with the workers' speeds as they were in the run.
        real_staleness: mean of the updates' staleness; 0 where all wait for all.
        simulated_staleness: the same as simulated.
        drift: largest change of a worker's speed around a run.
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
        """By which part the simulated speed is off, over all rounds."""
        return float(np.mean(self.simulated_per_s) / np.mean(self.real_per_s) - 1.0)

    @property
    def own_error(self) -> float:
        """By which part it is off at the workers' own speeds."""
        return float(np.mean(self.own_speed_per_s) / np.mean(self.real_per_s) - 1.0)

    @property
    def errors(self) -> list[float]:
        """The same of each round."""
        both = zip(self.simulated_per_s, self.real_per_s, strict=True)
        return [told / real - 1.0 for told, real in both]

    def line(self) -> str:
        """Return the row as people read it."""
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
    """Return every worker's curve, and the scatter of its steps."""
    curves = session.calibrate(name)
    folder = session.plan.folder / name
    return curves, [scatter(folder / f"worker-{k}.jsonl") for k in range(len(curves))]


def scatter(trace: Path) -> float:
    """Return by which part a lone worker's step differs from the mean of its size.

    From one step to the next, as a machine that wanders is in the mean times already; and by the
    median of that, as what happens seldom is in them, too.
    """
    kept = [undisturbed_s(seen) for seen in RunLog(trace).observations if seen.modelled]
    apart = [np.abs(np.diff(one)) / np.mean(one) for one in kept if len(one) > 1]
    # Of normal values, the median of the differences is 0.6745 times sqrt(2) deviations.
    return min(float(np.median(np.concatenate(apart))) / (0.6745 * 2**0.5), 1.0)


def groups(
    before: tuple[list[Curve], list[float]], after: tuple[list[Curve], list[float]]
) -> tuple[WorkerGroup, ...]:
    """Return the workers as two calibrations tell of them."""
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
    """Return what an all-reduce takes, and the slowest worker's update with a server.

    By equal shares, where the slowest worker waits for no other, so that its wait is communication.
    On one machine that is its own processor's work, which packs and unpacks.
    """
    reduce_s, serve_s = (
        float(np.mean([run.waited_s for run in runs if (run.sync, run.policy) == arm]))
        for arm in FITTED
    )
    return reduce_s, serve_s


def with_handling(workers: Sequence[WorkerGroup], slowest_s: float) -> list[WorkerGroup]:
    """Return the workers with what each takes itself for an update: in proportion to its speed."""
    least = min(group.samples_per_s for group in workers)
    return [
        group.model_copy(update={"handling_s": slowest_s * least / group.samples_per_s})
        for group in workers
    ]


def simulated(
    run: Measured, mode: SyncMode, steps: int, fitted: tuple[float, float]
) -> list[ModeResult]:
    """Return what is simulated in place of a run: to its cold steps' end, and to its own end."""
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
    """Return samples per second between the cold steps' end and the end, over all seeds."""
    samples = sum(o.samples for o in outcomes[1::2]) - sum(o.samples for o in outcomes[::2])
    return samples / (sum(o.time_s for o in outcomes[1::2]) - sum(o.time_s for o in outcomes[::2]))


def at_own_speed(run: Measured) -> Measured:
    """Return a run with its workers as quick as they were in it.

    What a worker without step in common waits for its messages is in its own time then.
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
    told = [simulated(run, mode, steps, fitted) for run in runs]
    within = (fitted[0], 0.0) if free else fitted
    return Row(
        str(mode),
        runs[0].policy,
        tuple(run.rates.samples_per_s for run in runs),
        tuple(map(per_s, told)),
        tuple(per_s(simulated(at_own_speed(run), mode, steps, within)) for run in runs),
        float(np.mean([run.rates.staleness[0] if run.rates.staleness else 0.0 for run in runs])),
        float(np.mean([one[-1].staleness.mean for one in told])) if free else 0.0,
        max(run.drift for run in runs),
    )


def parsed() -> argparse.Namespace:
    """Return what is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeds", default="0.8,0.4,0.16")
    parser.add_argument("--steps", type=int, default=80, help="of each run (80)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode and policy (2)")
    parser.add_argument("--runs", type=Path, help="runs of an earlier call, as --out wrote them")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    return parser.parse_args()


def main() -> None:
    """Run all modes, simulate them, and print how far the one is from the other."""
    asked = parsed()
    if asked.runs is not None:
        report = json.loads(asked.runs.read_text())
        runs, steps = [again(one) for one in report["runs"]], report.get("steps", asked.steps)
    else:
        runs, steps = ran(asked), asked.steps
    fitted = fitted_s(runs)
    print(f"{'':32}{'samples per second':>19}{'':8}{'at own':>11}{'staleness':>16}")
    print(f"{'mode':22}{'shares':10}{'real':>8}{'simulated':>11}{'off':>8}{'speed':>11}", end="")
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
    if asked.out is not None:
        all_runs = [plain(run) for run in runs]
        found = {"steps": steps, "rows": [asdict(one) for one in rows], "runs": all_runs}
        asked.out.write_text(json.dumps(found))


def ran(asked: argparse.Namespace) -> list[Measured]:
    """Run everything in the lab."""
    with TemporaryDirectory() as folder:
        plan = LabPlan(
            command=(own_script(),),
            speeds=parse_speeds(asked.speeds),
            policies=POLICIES,
            steps=asked.steps,
            repeats=asked.rounds,
            changes=(),
            folder=Path(folder),
            calibrate=True,
            modes=MODES,
        )
        viewer = Viewer(say=lambda line: print(line, file=sys.stderr, flush=True))
        with opened(plan, viewer) as session:
            return list(measured(session))


def again(told: dict[str, Any]) -> Measured:
    """Return a run from what `plain` has made of it."""
    kept = told["rates"]
    workers = tuple(WorkerRates(**one) for one in kept["workers"])
    staleness = None if kept["staleness"] is None else tuple(kept["staleness"])
    found = Rates(**{**kept, "workers": workers, "staleness": staleness})
    groups = tuple(WorkerGroup(**one) for one in told["workers"])
    return Measured(told["sync"], told["policy"], found, groups, told["drift"])


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
