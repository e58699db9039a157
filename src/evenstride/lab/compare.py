"""Run a user's script on limited workers under several policies, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evenstride.core.allocation import equal_finish
from evenstride.core.fleet import Fleet, Shares, Worker, as_shares
from evenstride.core.observation import median
from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import Given
from evenstride.errors import ConfigError, TraceError
from evenstride.lab.blocks import RunFigures, measured_curve, run_figures
from evenstride.lab.calibration import Curve, true_model
from evenstride.lab.folder import make_folder
from evenstride.lab.launch import Launch, Standing, run
from evenstride.lab.limits import PERIOD_S, Limits, open_limits
from evenstride.lab.result import Calibrated, Comparison, Oracle, Run, calibrated
from evenstride.lab.speeds import Change, Speeds, check_fit, usable_cpus

LEAST_PERIODS = 10
"""A step should span so many periods of the limits."""

_SIZE_S = 2.0
_NOT_OURS = {"EVENSTRIDE_CALIBRATE": "", "EVENSTRIDE_TRACE": "", "EVENSTRIDE_MAX_STEPS": ""}


@dataclass(frozen=True, slots=True)
class LabPlan:
    """What one lab session does.

    Args:
        command: script and arguments.
        speeds: of the workers.
        policies: to compare, in the order they alternate.
        steps: per run; the first 40 count as cold.
        repeats: runs of each policy.
        changes: of speed during each run.
        folder: for traces and logs.
        calibrate: whether to measure the workers' true curves before and after.
        fixed_splits: whether to run the calibrated optimum, and where ``adaptive`` ended, as fixed
            splits beside the policies; needs ``calibrate``.
    """

    command: tuple[str, ...]
    speeds: Speeds
    policies: tuple[str, ...]
    steps: int
    repeats: int
    changes: tuple[Change, ...]
    folder: Path
    calibrate: bool
    fixed_splits: bool = True


@dataclass(slots=True)
class Viewer:
    """Told what goes on.

    Args:
        say: a line for people.
        begins: a run's trace and title, as it begins.
        watch: called some 20 times a second with the run's standing.
    """

    say: Callable[[str], None] = lambda _: None
    begins: Callable[[Path, str], None] = lambda _path, _title: None
    watch: Callable[[Standing], None] = lambda _: None


@dataclass(slots=True)
class _Session:
    plan: LabPlan
    limits: Limits
    caveat: str
    viewer: Viewer
    figures: dict[str, list[RunFigures]] = field(default_factory=dict)

    def calibrate(self, name: str) -> list[Curve]:
        """Return every worker's curve, all measured at once, each running the script alone."""
        self.viewer.say(f"calibrating ({name}) ...")
        folder, total = self.plan.folder / name, sum(self.plan.speeds)
        workers = len(self.plan.speeds)
        parts = [
            sorted({round(p, 4) for p in (0.6 * s / total, s / total, 1 / workers)})
            for s in self.plan.speeds
        ]
        alone = tuple(
            {
                "EVENSTRIDE_CALIBRATE": ",".join(f"{part}:{_SIZE_S}" for part in mine),
                "EVENSTRIDE_TRACE": str(folder / f"worker-{worker}.jsonl"),
            }
            for worker, mine in enumerate(parts)
        )
        launch = Launch(self.plan.command, self.plan.speeds, environment=_NOT_OURS, alone=alone)
        for worker in range(workers):
            (folder / f"worker-{worker}.jsonl").unlink(missing_ok=True)
        run(launch, self.limits, folder)
        return [
            measured_curve(_made(folder / f"worker-{worker}.jsonl", self.plan))
            for worker in range(workers)
        ]

    def train(self, policy: str, repeat: int) -> RunFigures:
        """Run the script once under a policy and keep its figures."""
        trace = self.plan.folder / f"{_file_name(policy)}-{repeat + 1}" / "trace.jsonl"
        trace.unlink(missing_ok=True)  # of an earlier session in this folder
        self.viewer.begins(trace, policy)
        environment = {
            **_NOT_OURS,
            "EVENSTRIDE_POLICY": policy,
            "EVENSTRIDE_MAX_STEPS": str(self.plan.steps),
            "EVENSTRIDE_TRACE": str(trace),
        }
        launch = Launch(self.plan.command, self.plan.speeds, self.plan.changes, environment)
        run(launch, self.limits, trace.parent, self.viewer.watch)
        figures = run_figures(_made(trace, self.plan))
        if figures.policy != policy:
            raise ConfigError(
                f"the script was run under policy {policy}, but it sets {figures.policy} itself; "
                "leave policy= out of its Stride, so that EVENSTRIDE_POLICY counts"
            )
        self.viewer.say(
            f"{policy}: {median(figures.warm_s) * 1e3:.1f} ms per step, samples "
            f"{'/'.join(map(str, figures.shares))}"
        )
        self.figures.setdefault(policy, []).append(figures)
        return figures


def run_lab(plan: LabPlan, viewer: Viewer) -> Comparison:
    """Return the outcome of a lab session.

    Raises:
        ConfigError: the speeds do not fit this machine, or the script cannot be compared.
        LaunchError: a worker failed.
        LimitError: a limit could not be kept.
    """
    for speeds in (plan.speeds, *(change.speeds for change in plan.changes)):
        check_fit(speeds, usable_cpus())
    for policy in map(policy_from_spec, plan.policies):
        if isinstance(policy, Given):
            policy.check_workers(len(plan.speeds))
    if not Path(plan.command[0]).is_file():
        raise ConfigError(f"there is no script {plan.command[0]}; give the path of a Python file")
    make_folder(plan.folder)
    limits, caveat = open_limits(len(plan.speeds))
    viewer.say(f"Workers are slowed down by {limits.kind}." + (f" {caveat}" if caveat else ""))
    try:
        return _compare(_Session(plan, limits, caveat, viewer))
    finally:
        limits.close()


def _compare(session: _Session) -> Comparison:
    plan, before, fixed = session.plan, list[Curve](), list[str]()
    if plan.calibrate:
        before = session.calibrate("calibration-before")
    for repeat in range(plan.repeats):
        for policy in plan.policies:
            batch = session.train(policy, repeat).global_batch
        if plan.calibrate and plan.fixed_splits and not plan.changes:
            fixed = fixed or _fixed_splits(session, before, batch)
            for policy in fixed:
                session.train(policy, repeat)
    verdict = None
    if plan.calibrate:
        after = session.calibrate("calibration-after")
        verdict = calibrated(before, after, plan.speeds, batch, _communication_s(session))
    return _comparison(session, verdict, fixed, batch)


def _fixed_splits(session: _Session, curves: list[Curve], batch: int) -> list[str]:
    """Return the splits to run as fixed ones: the calibrated optimum, and where we ended."""
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(curves))), batch)
    best = as_shares(equal_finish(true_model(curves), fleet.lower, fleet.upper, batch))
    ended = [session.figures[p][-1].shares for p in session.plan.policies if p == "adaptive"]
    return ["static:" + ",".join(map(str, shares)) for shares in dict.fromkeys([best, *ended])]


def _comparison(
    session: _Session, verdict: Calibrated | None, fixed: list[str], batch: int
) -> Comparison:
    plan = session.plan
    oracle = _oracle(session, fixed)
    runs = [_run(session.figures[policy], oracle) for policy in plan.policies]
    by_policy = {run.policy: run.step_s for run in runs}
    balanced = next((p for p in reversed(plan.policies) if p != "uniform"), plan.policies[-1])
    speedup = by_policy["uniform"] / by_policy[balanced] if "uniform" in by_policy else None
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
        trace=str(plan.folder / f"{_file_name(balanced)}-1" / "trace.jsonl"),
        caveats=tuple(filter(None, (session.caveat, _short_steps(runs)))),
    )


def _communication_s(session: _Session) -> float:
    """Return the communication of a step: of all runs, the one in which least was left of it."""
    return min(one.communication_s for runs in session.figures.values() for one in runs)


def _short_steps(runs: list[Run]) -> str:
    """Return a sentence if a step spans so few periods of the limits that they blur it."""
    least_s, fastest = LEAST_PERIODS * PERIOD_S, min(runs, key=lambda run: run.step_s)
    if fastest.step_s >= least_s:
        return ""
    return (
        f"a step of {fastest.step_s * 1e3:.0f} ms is shorter than {LEAST_PERIODS} periods of the "
        f"CPU limits ({least_s * 1e3:.0f} ms), which makes it uneven; use a larger global batch or "
        "model"
    )


def _oracle(session: _Session, fixed: list[str]) -> Oracle | None:
    times = {policy: _step_s(session.figures[policy]) for policy in fixed}
    if not times:
        return None
    best = min(times, key=lambda policy: times[policy])
    return Oracle(_shares(session.figures[best]), times[best])


def _run(figures: list[RunFigures], oracle: Oracle | None) -> Run:
    step_s = _step_s(figures)
    return Run(
        policy=figures[0].policy,
        step_s=step_s,
        samples_per_s=figures[0].global_batch / step_s,
        efficiency=oracle.step_s / step_s if oracle else None,
        shares=_shares(figures),
        final_loss=None,
        test_accuracy=None,
        samples_lost=None,
        samples_repeated=None,
        changes=figures[-1].changes,
    )


def _step_s(figures: list[RunFigures]) -> float:
    return median(tuple(block_s for one in figures for block_s in one.warm_s))


def _shares(figures: list[RunFigures]) -> Shares:
    return figures[-1].shares


def _made(trace: Path, plan: LabPlan) -> Path:
    if not trace.is_file():
        raise TraceError(
            f"{plan.command[0]} made no Stride, so there is nothing to measure; the lab needs a "
            "script that uses evenstride (see examples/ddp.py)"
        )
    return trace


def _file_name(policy: str) -> str:
    return policy.replace(":", "-").replace(",", "-")
