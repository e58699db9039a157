"""Runs with a target loss: which reached it, after how many epochs, with which noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from evenstride.core.convergence.batch_laws import TimeToTarget, gamma_of, reaching, smoothed
from evenstride.errors import ConfigError
from evenstride.planner.workload.from_trace import noise_of
from evenstride.planner.workload.workload_profile import ReachedTraining, WorkloadProfile
from evenstride.trace.run_log import TrainingHistory, read_course

LOSS = "loss"
"""The metric that the training loss replaces, if a run has no other."""

PARTS = 8
"""Number of parts of the gain in stored runs. The gain over its parts is linear in
``n / (B + n)`` with the noise scale ``n``, and its laws are fitted as lines, so any other
number gives the same epochs."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The target of runs."""

    target: float
    metric: str = LOSS

    def __post_init__(self) -> None:
        if not isfinite(self.target):
            raise ConfigError(f"invalid --target-loss {self.target}: expected a number like 0.35")


@dataclass(frozen=True, slots=True)
class TargetResult:
    """When, or how nearly, a run reached its target."""

    of: str
    reaching: TimeToTarget


def reached(trace: Path, target: float, metric: str = LOSS) -> TargetResult:
    """Return when a run first reached a target of a falling metric.

    The metric is a name given to ``Stride.mean(name=)``. If a run has no ``loss`` under that name,
    it uses the smoothed training loss of the steps whose noise was measured.
    """
    return _reached(read_course(trace), Aim(target, metric), trace)


def _reached(course: TrainingHistory, aim: Aim, trace: Path) -> TargetResult:
    values, of = course.metrics.get(aim.metric, ()), aim.metric
    if not values and aim.metric == LOSS:
        values, of = tuple(smoothed(course.losses)), "training loss"
    if values:
        return TargetResult(of, reaching(values, aim.target))
    names = ", ".join(sorted(course.metrics)) or "none"
    raise ConfigError(
        f"{trace} does not record the metric {aim.metric} (recorded metrics: {names}); pass its "
        f'name where it is evaluated, stride.mean(total, count, name="{aim.metric}"), '
        "or measure the noise (Stride(noise_every=20)), which also records the training loss"
    )


def towards(profile: WorkloadProfile, trace: Path, aim: Aim) -> tuple[WorkloadProfile, str]:
    """Return a run's profile with its training result, and a sentence on it.

    The noise is then that until the target was reached. The sentence is empty if the run reached
    its target without a caveat.
    """
    course = read_course(trace)
    found = _reached(course, aim, trace)
    outcome, epochs = found.reaching, found.reaching.epochs
    target, batch = f"{found.of} {aim.target:g}", profile.global_batch
    run = f"{trace} (a batch of {batch})"
    why = _why_not(target, outcome, course)
    if why or not epochs:
        counts = "so it counts for step times and noise only"
        return profile.model_copy(update={"target": target}), f"{run} {why}, {counts}"
    noise = noise_of(course, until=epochs)
    gamma = None if noise is None else gamma_of(noise.scale, batch, PARTS)
    one = ReachedTraining(batch=batch, epochs=epochs, gamma=gamma)
    update = {"target": target, "trainings": (one,), "noise": noise}
    return profile.model_copy(update=update), ""


def _why_not(target: str, outcome: TimeToTarget, course: TrainingHistory) -> str:
    """Return why a run does not count as having reached its target; empty if it does."""
    if outcome.epochs is None:
        at = f"{outcome.nearest.value:g} after {_epochs(outcome.nearest.epochs)}"
        return f"did not reach {target}; its nearest value was {at}"
    if not outcome.epochs:
        return f"had reached {target} before training"
    if outcome.at_first:
        return (
            f"had reached {target} by its first evaluation, after {_epochs(outcome.epochs)}: when "
            "it did is unknown (evaluate earlier and more often)"
        )
    if len(course.batches) > 1:
        batches = ", ".join(map(str, course.batches))
        return f"reached {target} with several global batches ({batches})"
    return ""


def _epochs(epochs: float) -> str:
    return f"{epochs:.4g} epoch{'' if epochs == 1 else 's'}"


def require_target(profiles: Sequence[WorkloadProfile], aim: Aim, reasons: Iterable[str]) -> None:
    """Raise a `ConfigError` unless some run reached the aim, and no profile has another target."""
    mine = {f"{of} {aim.target:g}" for of in (aim.metric, "training loss")}
    for one in profiles:
        if one.trainings and one.target not in mine:
            raise ConfigError(
                f"the runs of the profile of {one.made_on} reached "
                f"{one.target or 'an unknown target'}, but the plan is for {aim.metric} "
                f"{aim.target:g}; give their target as --target-loss, or leave the profile out"
            )
    if not any(one.trainings for one in profiles):
        why = "; ".join(reasons) or "no run was given, and no profile has runs"
        raise ConfigError(
            f"no run reached {aim.metric} {aim.target:g}: {why}. Choose a target that runs "
            "reached, train longer, or give --epochs"
        )
