"""Run a user's script on limited workers in several modes of synchronisation, side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import calibrated
from evenstride.lab.comparison.lab_session import (
    LabPlan,
    Session,
    Viewer,
    check_own_choice,
    opened,
    short_steps,
)
from evenstride.lab.comparison.run_rates import Rates, rates
from evenstride.lab.comparison.step_blocks import BLOCK_STEPS, ended_early
from evenstride.lab.comparison.worker_curves import Curve, mean_curves, true_model
from evenstride.lab.limits.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Cost:
    """What one worker's step takes, as calibrated: ``fixed_s + per_sample_s * samples``."""

    fixed_s: float
    per_sample_s: float


@dataclass(frozen=True, slots=True)
class ModesComparison:
    """What modes and policies came to; field names are those of the JSON output."""

    workers: int  # their number
    speeds: Speeds  # asked for
    achieved_speeds: Speeds  # as calibrated, on the same scale; empty without a calibration
    costs: tuple[Cost, ...]  # of the workers' steps, as calibrated; empty without a calibration
    disturbed: bool  # whether the calibrations before and after differ by more than 5 %
    drift: float  # by how much they differ
    limits: str  # how the speeds were kept
    global_batch: int  # samples per step, or per round of the workers' own updates
    runs: tuple[Rates, ...]  # one after the other, as they ran
    folder: str  # of traces and logs
    caveats: tuple[str, ...] = ()  # sentences on what makes the figures less than they could be

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def by_arm(self) -> dict[tuple[str, str], list[Rates]]:
        """Return the runs of each mode and policy."""
        found: dict[tuple[str, str], list[Rates]] = {}
        for run in self.runs:
            found.setdefault((run.sync, run.policy), []).append(run)
        return found


def run_modes(plan: LabPlan, viewer: Viewer) -> ModesComparison:
    """Return the outcome of a lab session in the plan's modes, each under every policy.

    All arms alternate, and each run trains as many samples.

    Raises:
        ConfigError: the speeds do not fit this machine, or the script cannot be compared.
        LaunchError: a worker failed.
        LimitError: a limit could not be kept.
    """
    _check_changes(plan)
    with opened(plan, viewer) as session:
        before = session.calibrate("calibration-before") if plan.calibrate else []
        runs = [
            _train(session, str(mode), policy, repeat)
            for repeat in range(plan.repeats)
            for mode in plan.modes
            for policy in plan.policies
        ]
        after = session.calibrate("calibration-after") if plan.calibrate else []
        return _comparison(session, runs, before, after)


def _check_changes(plan: LabPlan) -> None:
    free = next((mode for mode in plan.modes if not mode.lockstep), None)
    if free is not None and any(change.at_step is not None for change in plan.changes):
        raise ConfigError(
            f"a change of speed at a step means another moment in {free}, whose workers have no "
            "step in common, than in other modes; give it in seconds, such as 30s:1,0.5"
        )


def _train(session: Session, sync: str, policy: str, repeat: int) -> Rates:
    found = rates(session.train(policy, repeat, sync))
    check_own_choice("policy", policy, found.policy, "EVENSTRIDE_POLICY")
    check_own_choice("sync", sync, found.sync, "EVENSTRIDE_SYNC")
    session.viewer.say(
        f"{sync} {policy}: {found.samples_per_s:.0f} samples/s, samples "
        f"{'/'.join(map(str, found.shares))}"
    )
    return found


def _comparison(
    session: Session, runs: list[Rates], before: list[Curve], after: list[Curve]
) -> ModesComparison:
    plan, batch = session.plan, runs[0].global_batch
    verdict = calibrated(before, after, plan.speeds, batch) if before else None
    steps_s = [median(tuple(one.period_s for one in run.workers if one.updates)) for run in runs]
    return ModesComparison(
        workers=len(plan.speeds),
        speeds=plan.speeds,
        achieved_speeds=verdict.achieved_speeds if verdict else (),
        costs=_costs(before, after),
        disturbed=verdict.disturbed if verdict else False,
        drift=verdict.drift if verdict else 0.0,
        limits=session.limits.kind,
        global_batch=batch,
        runs=tuple(runs),
        folder=str(plan.folder),
        caveats=tuple(
            filter(
                None,
                (
                    session.caveat,
                    short_steps(steps_s),
                    _few_steps(plan.steps),
                    ended_early((run.steps for run in runs), plan.steps),
                ),
            )
        ),
    )


def _few_steps(steps: int) -> str:
    if steps >= 2 * BLOCK_STEPS:
        return ""
    return (
        f"runs of {steps} steps are short: only the second half of each counts, in which shares "
        f"may still move; give --steps {2 * BLOCK_STEPS} or more"
    )


def _costs(before: list[Curve], after: list[Curve]) -> tuple[Cost, ...]:
    if not before:
        return ()
    model = true_model(mean_curves(before, after))
    return tuple(map(Cost, model.fixed_s.tolist(), model.per_sample_s.tolist()))
