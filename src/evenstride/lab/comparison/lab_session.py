"""A lab session: a user's script on limited workers, under several policies or modes in turn."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evenstride.core.arrays import Shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError, TraceError
from evenstride.lab.comparison.comparison_result import (
    Calibrated,
    Comparison,
    Curve,
    ModesComparison,
    Oracle,
    PolicyRun,
    best_split,
    calibrated,
)
from evenstride.lab.comparison.trace_figures import (
    BLOCK_STEPS,
    Rates,
    RunFigures,
    ended_early,
    measured_curve,
    rates,
    run_figures,
)
from evenstride.lab.processes.cpu_limits import PERIOD_S, Limits, open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import SpeedChange, Speeds, check_fit, usable_cpus
from evenstride.lab.processes.trial_checkpoints import (
    Trials,
    make_folder,
    require_script,
    temporary_trials,
)

LEAST_PERIODS = 10
"""A step should span so many periods of the limits."""
_SIZE_S = 2.0
_NOT_OURS = {"EVENSTRIDE_CALIBRATE": "", "EVENSTRIDE_TRACE": "", "EVENSTRIDE_MAX_STEPS": ""}
# Runs are compared at one batch: of a script that leaves it open, the lower bound.
_ONE_BATCH = "EVENSTRIDE_GLOBAL_BATCH"


@dataclass(frozen=True, slots=True)
class LabPlan:
    """What one lab session does."""

    command: tuple[str, ...]  # script and arguments
    speeds: Speeds  # of the workers
    policies: tuple[str, ...]  # to compare, in the order they alternate
    steps: int  # per run; the first 40 count as cold
    repeats: int  # runs of each policy
    changes: tuple[SpeedChange, ...]  # of speed during each run
    folder: Path  # for traces and logs
    calibrate: bool  # whether to measure the workers' true curves before and after
    # Whether to run the calibrated optimum, and where ``adaptive`` ended, as fixed splits beside
    # the policies; needs ``calibrate``.
    fixed_splits: bool = True
    # Of synchronisation to compare, each under every policy; the script's own if empty.
    modes: tuple[SyncMode, ...] = ()
    # Whether every run starts from the newest checkpoint in the script's own folder; else from
    # scratch.
    restore: bool = False


@dataclass(slots=True)
class Viewer:
    """Told what goes on."""

    say: Callable[[str], None] = lambda _: None  # a line for people
    # A run's trace and title, as it begins.
    begins: Callable[[Path, str], None] = lambda _path, _title: None
    # Called some 20 times a second with the run's standing.
    watch: Callable[[LaunchProgress], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Session:
    """Runs the script of a plan, over and over."""

    plan: LabPlan
    limits: Limits  # of the workers
    caveat: str  # what makes them less than they could be; empty if nothing does
    viewer: Viewer
    trials: Trials  # the folder of the runs' checkpoints; runs share none

    def calibrate(self, name: str) -> list[Curve]:
        """Return every worker's curve, all measured at once, each running the script alone."""
        self.viewer.say(f"calibrating ({name}) ...")
        folder, total = self.plan.folder / name, sum(self.plan.speeds)
        workers = len(self.plan.speeds)
        parts = [
            sorted({round(p, 4) for p in (0.6 * s / total, s / total, 1 / workers)})
            for s in self.plan.speeds
        ]
        traces = [folder / f"worker-{worker}.jsonl" for worker in range(workers)]
        alone = tuple(
            {
                "EVENSTRIDE_CALIBRATE": ",".join(f"{part}:{_SIZE_S}" for part in mine),
                "EVENSTRIDE_TRACE": str(traces[worker]),
                **self.trials.variables(f"{name}/worker-{worker}"),
            }
            for worker, mine in enumerate(parts)
        )
        launch = Launch(self.plan.command, self.plan.speeds, environment=_same(), alone=alone)
        for trace in traces:
            trace.unlink(missing_ok=True)
        self._run(launch, folder)
        return [measured_curve(self._made(trace)) for trace in traces]

    def train(self, policy: str, repeat: int, sync: str = "") -> Path:
        """Run the script under a policy, in a mode or its own; return the trace."""
        trace = self.trace(policy, repeat, sync)
        trace.unlink(missing_ok=True)  # of an earlier session in this folder
        self.viewer.begins(trace, f"{sync} {policy}".strip())
        environment = {
            **_same(),
            "EVENSTRIDE_POLICY": policy,
            "EVENSTRIDE_MAX_STEPS": str(self.plan.steps),
            "EVENSTRIDE_TRACE": str(trace),
            **({"EVENSTRIDE_SYNC": sync} if sync else {}),
            **self.trials.variables(trace.parent.name),
        }
        launch = Launch(self.plan.command, self.plan.speeds, self.plan.changes, environment)
        self._run(launch, trace.parent, self.viewer.watch)
        return self._made(trace)

    def trace(self, policy: str, repeat: int, sync: str = "") -> Path:
        parts = (re.sub(r"[^\w.=+-]+", "-", part).strip("-") for part in (sync, policy) if part)
        return self.plan.folder / f"{'-'.join(parts)}-{repeat + 1}" / "trace.jsonl"

    def verdict(
        self, before: list[Curve], batch: int, communication_s: float = 0.0
    ) -> Calibrated | None:
        """Calibrate again, and return what both say; ``None`` if the plan wants neither."""
        if not self.plan.calibrate:
            return None
        after = self.calibrate("calibration-after")
        return calibrated(before, after, self.plan.speeds, batch, communication_s)

    def _run(
        self, launch: Launch, folder: Path, watch: Callable[[LaunchProgress], None] = lambda _: None
    ) -> None:
        try:
            run(launch, self.limits, folder, watch)
        finally:
            for line in self.trials.news():
                self.viewer.say(line)

    def _made(self, trace: Path) -> Path:
        if not trace.is_file():
            raise TraceError(
                f"{self.plan.command[0]} made no Stride, so there is nothing to measure; the lab "
                "needs a script that uses evenstride (see examples/ddp.py)"
            )
        return trace


def _same() -> dict[str, str]:
    """Return the variables that all runs of a session have."""
    return {**_NOT_OURS, _ONE_BATCH: os.environ.get(_ONE_BATCH) or "low"}


@contextlib.contextmanager
def opened(plan: LabPlan, viewer: Viewer) -> Iterator[Session]:
    """Check a plan, and yield its session; the limits are lifted afterwards."""
    for speeds in (plan.speeds, *(change.speeds for change in plan.changes)):
        check_fit(speeds, usable_cpus())
    for policy in map(policy_from_spec, plan.policies):
        if isinstance(policy, GivenShares):
            policy.check_workers(len(plan.speeds))
    require_script(plan.command[0])
    make_folder(plan.folder)
    limits, caveat = open_limits(len(plan.speeds))
    viewer.say(f"Workers are slowed down by {limits.kind}." + (f" {caveat}" if caveat else ""))
    try:
        with temporary_trials(plan.folder, restore=plan.restore) as trials:
            yield Session(plan, limits, caveat, viewer, trials)
    finally:
        limits.close()


def _check_own_choice(what: str, asked: str, found: str, variable: str) -> None:
    """Refuse a script that did not do what the lab asked of it."""
    if found != asked:
        raise ConfigError(
            f"the script was run under {what} {asked}, but it sets {found} itself; leave {what}= "
            f"out of its Stride, so that {variable} counts"
        )


def _caveats(
    session: Session, steps_s: Iterable[float], trained: Iterable[float], more: str = ""
) -> tuple[str, ...]:
    """Return what makes the figures less than they could be.

    Given the times of steps, and how many steps each run has trained.
    """
    early = ended_early(trained, session.plan.steps)
    return tuple(filter(None, (session.caveat, _short_steps(steps_s), more, early)))


def _short_steps(steps_s: Iterable[float]) -> str:
    """Return a sentence if a step spans so few periods of the limits that they blur it."""
    least_s, step_s = LEAST_PERIODS * PERIOD_S, min(steps_s)
    if step_s >= least_s:
        return ""
    return (
        f"a step of {step_s * 1e3:.0f} ms is shorter than {LEAST_PERIODS} periods of the "
        f"CPU limits ({least_s * 1e3:.0f} ms), which makes it uneven; use a larger global batch or "
        "model"
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """A session's runs so far: their figures by policy."""

    session: Session
    figures: dict[str, list[RunFigures]] = field(default_factory=dict)

    def train(self, policy: str, repeat: int) -> RunFigures:
        figures = run_figures(self.session.train(policy, repeat))
        _check_own_choice("policy", policy, figures.policy, "EVENSTRIDE_POLICY")
        _check_steps(figures.sync)
        self.session.viewer.say(
            f"{policy}: {median(figures.warm_s) * 1e3:.1f} ms per step, samples "
            f"{'/'.join(map(str, figures.shares))}"
        )
        self.figures.setdefault(policy, []).append(figures)
        return figures

    def step_s(self, policy: str) -> float:
        return median(tuple(block_s for one in self.figures[policy] for block_s in one.warm_s))

    def shares(self, policy: str) -> Shares:
        return self.figures[policy][-1].shares


def run_lab(plan: LabPlan, viewer: Viewer) -> Comparison:
    """Return the outcome of a lab session, compared by the time of a step."""
    with opened(plan, viewer) as session:
        return _compare(_Runs(session))


def _check_steps(sync: str) -> None:
    """Refuse a script that sets a mode in which workers have no steps in common."""
    if sync and not sync_from_spec(sync).lockstep:
        raise ConfigError(
            f"the script trains with sync={sync!r}, whose workers have no step in common, so that "
            f"the time of a step means nothing; leave sync= out of its Stride and add --sync "
            f"{sync!r}, which compares by time"
        )


def _compare(runs: _Runs) -> Comparison:
    session = runs.session
    plan, before, fixed = session.plan, list[Curve](), list[str]()
    if plan.calibrate:
        before = session.calibrate("calibration-before")
    for repeat in range(plan.repeats):
        for policy in plan.policies:
            batch = runs.train(policy, repeat).global_batch
        if plan.calibrate and plan.fixed_splits and not plan.changes:
            fixed = fixed or _fixed_splits(runs, before, batch)
            for policy in fixed:
                runs.train(policy, repeat)
    # Of all runs, the one in which least was left of the communication of a step.
    each_s = [one.communication_s for some in runs.figures.values() for one in some]
    return _comparison(runs, session.verdict(before, batch, min(each_s)), fixed, batch)


def _fixed_splits(runs: _Runs, curves: list[Curve], batch: int) -> list[str]:
    """Return the splits to run as fixed ones: the calibrated optimum, and where we ended."""
    best = best_split(curves, batch)
    ended = [runs.shares(p) for p in runs.session.plan.policies if p == "adaptive"]
    return ["static:" + ",".join(map(str, shares)) for shares in dict.fromkeys([best, *ended])]


def _comparison(
    made: _Runs, verdict: Calibrated | None, fixed: list[str], batch: int
) -> Comparison:
    session = made.session
    plan, oracle = session.plan, _oracle(made, fixed)
    runs = [_run(made, policy, oracle) for policy in plan.policies]
    by_policy = {one.policy: one.step_s for one in runs}
    balanced = next((p for p in reversed(plan.policies) if p != "uniform"), plan.policies[-1])
    speedup = by_policy["uniform"] / by_policy[balanced] if "uniform" in by_policy else None
    trained = [one.steps for some in made.figures.values() for one in some]
    return Comparison(
        workers=len(plan.speeds),
        speeds=plan.speeds,
        achieved_speeds=verdict.achieved_speeds if verdict else (),
        disturbed=verdict.disturbed if verdict else False,
        drift=verdict.drift if verdict else 0.0,
        limits=session.limits.kind,
        global_batch=batch,
        runs=runs,
        oracle=oracle,
        speedup=speedup,
        # With changes, the bounds would be those of the speeds at the start, which did not last.
        bound=verdict.bound if verdict and not plan.changes else None,
        linear_bound=verdict.linear_bound if verdict and not plan.changes else None,
        trace=str(session.trace(balanced, 0)),
        caveats=_caveats(session, by_policy.values(), trained),
    )


def _oracle(runs: _Runs, fixed: list[str]) -> Oracle | None:
    if not fixed:
        return None
    best = min(fixed, key=runs.step_s)
    return Oracle(runs.shares(best), runs.step_s(best))


def _run(runs: _Runs, policy: str, oracle: Oracle | None) -> PolicyRun:
    figures, step_s = runs.figures[policy], runs.step_s(policy)
    return PolicyRun(
        policy=figures[0].policy,
        step_s=step_s,
        samples_per_s=figures[0].global_batch / step_s,
        efficiency=oracle.step_s / step_s if oracle else None,
        shares=runs.shares(policy),
        final_loss=None,
        test_accuracy=None,
        samples_lost=None,
        samples_repeated=None,
        changes=figures[-1].changes,
    )


def run_modes(plan: LabPlan, viewer: Viewer) -> ModesComparison:
    """Return the outcome of a lab session in the plan's modes, each under every policy, by time.

    All arms alternate, and each run trains as many samples.
    """
    _check_changes(plan)
    with opened(plan, viewer) as session:
        before = session.calibrate("calibration-before") if plan.calibrate else []
        runs = [
            _rates_of(session, str(mode), policy, repeat)
            for repeat in range(plan.repeats)
            for mode in plan.modes
            for policy in plan.policies
        ]
        batch = runs[0].global_batch
        return _modes_comparison(session, runs, session.verdict(before, batch))


def _check_changes(plan: LabPlan) -> None:
    free = next((mode for mode in plan.modes if not mode.lockstep), None)
    if free is not None and any(change.at_step is not None for change in plan.changes):
        raise ConfigError(
            f"a change of speed at a step means another moment in {free}, whose workers have no "
            "step in common, than in other modes; give it in seconds, such as 30s:1,0.5"
        )


def _rates_of(session: Session, sync: str, policy: str, repeat: int) -> Rates:
    found = rates(session.train(policy, repeat, sync))
    _check_own_choice("policy", policy, found.policy, "EVENSTRIDE_POLICY")
    _check_own_choice("sync", sync, found.sync, "EVENSTRIDE_SYNC")
    session.viewer.say(
        f"{sync} {policy}: {found.samples_per_s:.0f} samples/s, samples "
        f"{'/'.join(map(str, found.shares))}"
    )
    return found


def _modes_comparison(
    session: Session, runs: list[Rates], verdict: Calibrated | None
) -> ModesComparison:
    plan = session.plan
    steps_s = [median(tuple(one.period_s for one in each.workers if one.updates)) for each in runs]
    trained = [each.steps for each in runs]
    return ModesComparison(
        workers=len(plan.speeds),
        speeds=plan.speeds,
        achieved_speeds=verdict.achieved_speeds if verdict else (),
        costs=verdict.costs if verdict else (),
        disturbed=verdict.disturbed if verdict else False,
        drift=verdict.drift if verdict else 0.0,
        limits=session.limits.kind,
        global_batch=runs[0].global_batch,
        runs=tuple(runs),
        folder=str(plan.folder),
        caveats=_caveats(session, steps_s, trained, _few_steps(plan.steps)),
    )


def _few_steps(steps: int) -> str:
    if steps >= 2 * BLOCK_STEPS:
        return ""
    return (
        f"runs of {steps} steps are short: only the second half of each counts, in which shares "
        f"may still move; give --steps {2 * BLOCK_STEPS} or more"
    )
