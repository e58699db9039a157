"""Run a user's script on limited workers under several policies, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenstride.core.allocation.min_max import equal_finish
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_shares
from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import (
    Calibrated,
    Comparison,
    Oracle,
    PolicyRun,
    calibrated,
)
from evenstride.lab.comparison.lab_session import (
    LabPlan,
    Session,
    Viewer,
    check_own_choice,
    opened,
    short_steps,
)
from evenstride.lab.comparison.step_blocks import RunFigures, ended_early, run_figures
from evenstride.lab.comparison.worker_curves import Curve, true_model


@dataclass(frozen=True, slots=True)
class _Runs:
    """A session's runs so far: their figures by policy."""

    session: Session
    figures: dict[str, list[RunFigures]] = field(default_factory=dict)

    def train(self, policy: str, repeat: int) -> RunFigures:
        figures = run_figures(self.session.train(policy, repeat))
        check_own_choice("policy", policy, figures.policy, "EVENSTRIDE_POLICY")
        _check_steps(figures.sync)
        self.session.viewer.say(
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
    with opened(plan, viewer) as session:
        return _compare(_Runs(session))


def _check_steps(sync: str) -> None:
    """Raise if the workers have no steps in common.

    Raises:
        ConfigError: the script sets such a mode.
    """
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
    verdict = None
    if plan.calibrate:
        after = session.calibrate("calibration-after")
        verdict = calibrated(before, after, plan.speeds, batch, _communication_s(runs))
    return _comparison(runs, verdict, fixed, batch)


def _fixed_splits(runs: _Runs, curves: list[Curve], batch: int) -> list[str]:
    """Return the splits to run as fixed ones: the calibrated optimum, and where we ended."""
    fleet = Fleet(tuple(Worker(str(rank)) for rank in range(len(curves))), batch)
    best = as_shares(equal_finish(true_model(curves), fleet.lower, fleet.upper, batch))
    ended = [runs.figures[p][-1].shares for p in runs.session.plan.policies if p == "adaptive"]
    return ["static:" + ",".join(map(str, shares)) for shares in dict.fromkeys([best, *ended])]


def _comparison(
    made: _Runs, verdict: Calibrated | None, fixed: list[str], batch: int
) -> Comparison:
    session = made.session
    plan, oracle = session.plan, _oracle(made, fixed)
    runs = [_run(made.figures[policy], oracle) for policy in plan.policies]
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
        trace=str(session.trace(balanced, 0)),
        caveats=_caveats(made, runs),
    )


def _caveats(made: _Runs, runs: list[PolicyRun]) -> tuple[str, ...]:
    session = made.session
    steps = [one.steps for some in made.figures.values() for one in some]
    short = short_steps(run.step_s for run in runs)
    return tuple(filter(None, (session.caveat, short, ended_early(steps, session.plan.steps))))


def _communication_s(runs: _Runs) -> float:
    """Return the communication of a step: of all runs, the one in which least was left of it."""
    return min(one.communication_s for some in runs.figures.values() for one in some)


def _oracle(runs: _Runs, fixed: list[str]) -> Oracle | None:
    times = {policy: _step_s(runs.figures[policy]) for policy in fixed}
    if not times:
        return None
    best = min(times, key=lambda policy: times[policy])
    return Oracle(_shares(runs.figures[best]), times[best])


def _run(figures: list[RunFigures], oracle: Oracle | None) -> PolicyRun:
    step_s = _step_s(figures)
    return PolicyRun(
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
