"""A lab session: a user's script on CPU-limited workers, under several policies or modes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from evenstride.core.allocation.speedup import Prospect
from evenstride.core.arrays import Shares
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError, TraceError
from evenstride.lab.comparison.block_comparison import (
    Ratios,
    busy_curves,
    compare_blocks,
    completed,
)
from evenstride.lab.comparison.comparison_result import (
    Calibrated,
    Comparison,
    Curve,
    ModesComparison,
    Oracle,
    PolicyRun,
    achieved_speeds,
    best_split,
    calibrated,
    drift,
    mean_curves,
    prospect_of,
)
from evenstride.lab.comparison.paired_ratios import UNCERTAIN, geometric_mean, paired_ratio
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
"""Fewest periods of the CPU limits in a step whose time means something."""
_SIZE_S = 2.0
_NOT_OURS = {"EVENSTRIDE_CALIBRATE": "", "EVENSTRIDE_TRACE": "", "EVENSTRIDE_MAX_STEPS": ""}
# Runs are compared at one batch. A script that leaves it open trains at the lower bound.
_ONE_BATCH = "EVENSTRIDE_GLOBAL_BATCH"
_ONE_ROUND = {
    True: "each policy ran once, so the intervals allow for half the drift between the two "
    "calibrations; give --repeats 2 or more for intervals from the runs alone",
    False: "each policy ran once, so the intervals do not include the drift of the machine's speed "
    "from one run to the next; give --repeats 2 or more",
}
"""Caveats of a single round, by whether there is a calibration."""

_ArmT = TypeVar("_ArmT")


@dataclass(frozen=True, slots=True)
class LabPlan:
    """The request for a lab session."""

    command: tuple[str, ...]  # script and arguments
    speeds: Speeds  # of the workers
    policies: tuple[str, ...]  # to compare; every other round reverses their order
    steps: int  # per run, including the 40 steps of the cold block
    repeats: int  # rounds, in which each policy runs once
    changes: tuple[SpeedChange, ...]
    folder: Path  # for traces and logs
    # Whether to measure the workers apart from training, before and after.
    calibrate: bool
    # Whether to run fixed splits too: the calibrated optimum, and the last split of ``adaptive``.
    # Needs ``calibrate``.
    fixed_splits: bool = True
    # Synchronisation modes to compare, each under every policy. If empty, the script's own mode.
    modes: tuple[SyncMode, ...] = ()
    # Whether every run starts from the newest checkpoint in the script's own folder.
    restore: bool = False


@dataclass(slots=True)
class Viewer:
    """Callbacks that show the progress of a session."""

    say: Callable[[str], None] = lambda _: None  # prints a line
    # Called with trace and title of each run that starts.
    begins: Callable[[Path, str], None] = lambda _path, _title: None
    # Called about 20 times a second with the progress of the run.
    watch: Callable[[LaunchProgress], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Session:
    """Runs the script of a plan, again and again."""

    plan: LabPlan
    limits: Limits  # of the workers
    caveat: str  # what makes the limits less accurate; empty if nothing does
    viewer: Viewer
    trials: Trials  # the folder for the checkpoints of the runs; each run has its own subfolder

    def calibrate(self, name: str) -> list[Curve]:
        """Return the time curve of every worker.

        All workers are measured at the same time. Each runs the script in a group of its own.
        """
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
        """Run the script under a policy and return the trace; ``sync`` overrides the mode."""
        trace = self.trace(policy, repeat, sync)
        trace.unlink(missing_ok=True)  # an earlier session may have left one
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
                f"{self.plan.command[0]} created no Stride, so there is no step time to measure; "
                "run a script that uses evenstride, such as examples/ddp.py"
            )
        return trace


def _same() -> dict[str, str]:
    """Return the environment variables that all runs of a session share."""
    return {**_NOT_OURS, _ONE_BATCH: os.environ.get(_ONE_BATCH) or "low"}


@contextlib.contextmanager
def opened(plan: LabPlan, viewer: Viewer) -> Iterator[Session]:
    """Check a plan and yield its session; remove the limits afterwards."""
    for speeds in (plan.speeds, *(change.speeds for change in plan.changes)):
        check_fit(speeds, usable_cpus())
    for policy in map(policy_from_spec, plan.policies):
        if isinstance(policy, GivenShares):
            policy.check_workers(len(plan.speeds))
    require_script(plan.command[0])
    make_folder(plan.folder)
    limits, caveat = open_limits(len(plan.speeds))
    viewer.say(f"CPU limits: {limits.kind}." + (f" {caveat}" if caveat else ""))
    try:
        with temporary_trials(plan.folder, restore=plan.restore) as trials:
            yield Session(plan, limits, caveat, viewer, trials)
    finally:
        limits.close()


def _check_own_choice(what: str, asked: str, found: str, variable: str) -> None:
    """Refuse a script that sets itself what the lab varies."""
    if found != asked:
        raise ConfigError(
            f"the lab ran the script with {what} {asked}, but the script sets {found} itself; "
            f"remove {what}= from its Stride, so that {variable} takes effect"
        )


def _caveats(
    session: Session, steps_s: Iterable[float], trained: Iterable[float], more: str = ""
) -> tuple[str, ...]:
    """Return sentences on what limits the accuracy of the figures.

    ``steps_s`` are step times, and ``trained`` the numbers of steps of all runs.
    """
    early = ended_early(trained, session.plan.steps)
    once = _ONE_ROUND[session.plan.calibrate] if session.plan.repeats == 1 else ""
    return tuple(filter(None, (session.caveat, _short_steps(steps_s), more, early, once)))


def _short_steps(steps_s: Iterable[float]) -> str:
    """Return a sentence if a step spans too few periods of the limits."""
    least_s, step_s = LEAST_PERIODS * PERIOD_S, min(steps_s)
    if step_s >= least_s:
        return ""
    return (
        f"a step of {step_s * 1e3:.0f} ms is shorter than {LEAST_PERIODS} periods of the "
        f"CPU limits ({least_s * 1e3:.0f} ms), so its time varies; use a larger global batch or "
        "model"
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """The figures of the runs of a session, by policy and in the order of the rounds."""

    session: Session
    figures: dict[str, list[RunFigures]] = field(default_factory=dict)

    def train(self, policy: str, repeat: int) -> RunFigures:
        figures = run_figures(self.session.train(policy, repeat))
        _check_own_choice("policy", policy, figures.policy, "EVENSTRIDE_POLICY")
        _check_steps(figures.sync)
        self.session.viewer.say(
            f"{policy}: {geometric_mean([figures.warm_s]) * 1e3:.1f} ms per step, samples "
            f"{'/'.join(map(str, figures.shares))}"
        )
        self.figures.setdefault(policy, []).append(figures)
        return figures

    def blocks_s(self, policy: str) -> list[tuple[float, ...]]:
        return [one.warm_s for one in self.figures[policy]]

    def step_s(self, policy: str) -> float:
        return geometric_mean(self.blocks_s(policy))

    def shares(self, policy: str) -> Shares:
        return self.figures[policy][-1].shares

    def of_round(self, repeat: int) -> list[RunFigures]:
        return [some[repeat] for some in self.figures.values()]


def run_lab(plan: LabPlan, viewer: Viewer) -> Comparison:
    """Return the comparison of the policies by their step times."""
    with opened(plan, viewer) as session:
        return _compare(_Runs(session))


def _check_steps(sync: str) -> None:
    """Refuse a script that sets a mode in which the workers share no steps."""
    if sync and not sync_from_spec(sync).lockstep:
        raise ConfigError(
            f"the script trains with sync={sync!r}, in which workers do not step together, so "
            f"there is no step time to compare; remove sync= from its Stride and add --sync "
            f"{sync!r}, which compares samples per second"
        )


def _compare(runs: _Runs) -> Comparison:
    session = runs.session
    plan, before, fixed = session.plan, list[Curve](), list[str]()
    if plan.calibrate:
        before = session.calibrate("calibration-before")
    for repeat in range(plan.repeats):
        for policy in _in_turn([*plan.policies, *fixed], repeat):
            batch = runs.train(policy, repeat).global_batch
        if not repeat and plan.calibrate and plan.fixed_splits and not plan.changes:
            fixed = _fixed_splits(runs, before, batch)
            for policy in fixed:
                runs.train(policy, repeat)
    after = session.calibrate("calibration-after") if plan.calibrate else []
    return _comparison(runs, (before, after), fixed, batch)


def _in_turn(policies: Sequence[_ArmT], repeat: int) -> Sequence[_ArmT]:
    """Return the policies, in the reverse order in every other round.

    The reversal cancels a steady drift of the machine's speed.
    """
    return policies[::-1] if repeat % 2 else policies


def _fixed_splits(runs: _Runs, curves: list[Curve], batch: int) -> list[str]:
    """Return the fixed splits to run: the calibrated optimum, and the last one of ``adaptive``."""
    best = best_split(curves, batch)
    ended = [runs.shares(p) for p in runs.session.plan.policies if p == "adaptive"]
    return ["static:" + ",".join(map(str, shares)) for shares in dict.fromkeys([best, *ended])]


def _comparison(
    runs: _Runs, calibrations: tuple[list[Curve], list[Curve]], fixed: list[str], batch: int
) -> Comparison:
    session, plan = runs.session, runs.session.plan
    moved = drift(*calibrations) if plan.calibrate else 0.0
    balanced = next((p for p in reversed(plan.policies) if p != "uniform"), plan.policies[-1])
    alone = mean_curves(*calibrations)
    # With changes, a bound would be that of the speeds at the start.
    bounded = plan.calibrate and not plan.changes
    prospects = _prospects(runs, alone, batch) if bounded else []
    blocks_s = {policy: runs.blocks_s(policy) for policy in runs.figures}
    ratios = compare_blocks(blocks_s, balanced, fixed, prospects, _allowed_drift(plan, moved))
    trained = [one.steps for some in runs.figures.values() for one in some]
    return Comparison(
        workers=len(plan.speeds),
        speeds=plan.speeds,
        achieved_speeds=_speeds(runs, alone) if plan.calibrate else (),
        # Without a calibration, nothing is claimed that could be disturbed.
        disturbed=plan.calibrate and ratios.disturbed,
        drift=round(moved, 4),
        limits=session.limits.kind,
        global_batch=batch,
        runs=[_run(runs, policy, ratios) for policy in plan.policies],
        oracle=_oracle(runs, ratios.oracle),
        linear_bound=geometric_mean([[one.linear_bound for one in prospects]])
        if prospects
        else None,
        trace=str(session.trace(balanced, 0)),
        caveats=_caveats(session, map(runs.step_s, plan.policies), trained),
        **ratios.fields(),
    )


def _allowed_drift(plan: LabPlan, moved: float) -> float:
    """Return the drift that the intervals allow for, given that between the two calibrations.

    In a single round, the scatter of the pairs does not show how the speed drifts from one run to
    the next. The runs lie between the calibrations, so the drift between two of them is less.
    """
    return 0.5 * moved if plan.repeats == 1 else 0.0


def _prospects(runs: _Runs, alone: Sequence[Curve], batch: int) -> list[Prospect]:
    """Return the prospect of each round, from the workers' busy times in it.

    The communication of a step is that of the run in which the least of it is left over.
    """
    found = []
    for repeat in range(runs.session.plan.repeats):
        of_round = runs.of_round(repeat)
        curves = completed(busy_curves(_merged(of_round)), alone)
        found.append(prospect_of(curves, batch, min(one.communication_s for one in of_round)))
    return found


def _speeds(runs: _Runs, alone: Sequence[Curve]) -> Speeds:
    plan = runs.session.plan
    work = _merged([one for some in runs.figures.values() for one in some])
    curves = alone if plan.changes else completed(busy_curves(work), alone)
    return achieved_speeds(curves, max(plan.speeds))


def _merged(figures: Sequence[RunFigures]) -> list[list[tuple[int, float]]]:
    """Return the work of each worker in all runs."""
    return [
        [step for one in mine for step in one]
        for mine in zip(*(f.work for f in figures), strict=True)
    ]


def _oracle(runs: _Runs, policy: str | None) -> Oracle | None:
    return None if policy is None else Oracle(runs.shares(policy), runs.step_s(policy))


def _run(runs: _Runs, policy: str, ratios: Ratios) -> PolicyRun:
    figures, step_s = runs.figures[policy], runs.step_s(policy)
    efficiency = ratios.efficiency.get(policy)
    return PolicyRun(
        policy=figures[0].policy,
        step_s=step_s,
        samples_per_s=figures[0].global_batch / step_s,
        efficiency=efficiency.value if efficiency else None,
        shares=runs.shares(policy),
        final_loss=None,
        test_accuracy=None,
        samples_lost=None,
        samples_repeated=None,
        changes=figures[-1].changes,
        efficiency_interval=efficiency.interval if efficiency else None,
    )


def run_modes(plan: LabPlan, viewer: Viewer) -> ModesComparison:
    """Return the comparison of the plan's modes, each under every policy, by samples per second.

    All arms alternate, and each run trains the same number of samples.
    """
    _check_changes(plan)
    arms = [(str(mode), policy) for mode in plan.modes for policy in plan.policies]
    with opened(plan, viewer) as session:
        before = session.calibrate("calibration-before") if plan.calibrate else []
        runs = [
            _rates_of(session, *arm, repeat)
            for repeat in range(plan.repeats)
            for arm in _in_turn(arms, repeat)
        ]
        if not plan.calibrate:
            return _modes_comparison(session, runs, None)
        after = session.calibrate("calibration-after")
        verdict = calibrated(before, after, plan.speeds, runs[0].global_batch)
        return _modes_comparison(session, runs, verdict)


def _check_changes(plan: LabPlan) -> None:
    free = next((mode for mode in plan.modes if not mode.lockstep), None)
    if free is not None and any(change.at_step is not None for change in plan.changes):
        raise ConfigError(
            f"the workers of {free} do not step together, so a change of speed at a step would "
            "happen at another time than in other modes; give the time in seconds, such as "
            "30s:1,0.5"
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
    outcome = ModesComparison(
        workers=len(plan.speeds),
        speeds=plan.speeds,
        achieved_speeds=verdict.achieved_speeds if verdict else (),
        costs=verdict.costs if verdict else (),
        disturbed=False,
        drift=verdict.drift if verdict else 0.0,
        limits=session.limits.kind,
        global_batch=runs[0].global_batch,
        runs=tuple(runs),
        folder=str(plan.folder),
        caveats=_caveats(session, steps_s, trained, _few_steps(plan.steps)),
    )
    uncertainty = _modes_uncertainty(outcome, _allowed_drift(plan, outcome.drift))
    return replace(
        outcome,
        disturbed=verdict is not None and uncertainty > UNCERTAIN,
        uncertainty=round(uncertainty, 4),
    )


def _modes_uncertainty(outcome: ModesComparison, moved: float) -> float:
    """Return the largest half-width of the ratio of an arm's rate to that of the first arm."""
    first, *others = [[run.blocks_per_s for run in runs] for runs in outcome.by_arm().values()]
    ratios = (paired_ratio(one, first).widened(moved) for one in others)
    return max((ratio.half_width or 0.0 for ratio in ratios), default=0.0)


def _few_steps(steps: int) -> str:
    if steps >= 2 * BLOCK_STEPS:
        return ""
    return (
        f"runs of {steps} steps are short: only the second half of each counts, and shares may "
        f"still change in it; give --steps {2 * BLOCK_STEPS} or more"
    )
