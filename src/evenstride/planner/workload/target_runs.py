"""Runs that were to come to a target loss: which did, after how many epochs, with which noise."""

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
"""The metric for which the training loss stands in, if a run has no other."""

PARTS = 8
"""Parts of the gain that trainings are told with. The gain over its parts is a line in
``n / (B + n)`` with the noise scale ``n``, and laws of it are fitted as lines, so that any other
number gives the same epochs."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What runs were to come to."""

    target: float
    metric: str = LOSS

    def __post_init__(self) -> None:
        if not isfinite(self.target):
            raise ConfigError(f"--target-loss is {self.target}; give a number, such as 0.35")


@dataclass(frozen=True, slots=True)
class TargetResult:
    """How a run stands to an aim."""

    of: str
    reaching: TimeToTarget


def reached(trace: Path, target: float, metric: str = LOSS) -> TargetResult:
    """Return when a run first came to a target of a metric, which is to fall.

    The metric is a name given to ``Stride.mean(name=)``. If a run has no ``loss`` under that name,
    the training loss of the steps whose noise was measured stands in, smoothed.
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
        f"{trace} does not tell of its {aim.metric} (recorded metrics: {names}); give the "
        f'name to the mean where it is evaluated, stride.mean(total, count, name="{aim.metric}"), '
        "or measure the noise (Stride(noise_every=20)), with which the training loss is recorded"
    )


def towards(profile: WorkloadProfile, trace: Path, aim: Aim) -> tuple[WorkloadProfile, str]:
    """Return a run's profile with the training that it is, and a sentence on that.

    The noise is then that until the target was reached. The sentence is empty if the run came to
    its target and no more is to be said.
    """
    course = read_course(trace)
    found = _reached(course, aim, trace)
    told, epochs = found.reaching, found.reaching.epochs
    target, batch = f"{found.of} {aim.target:g}", profile.global_batch
    run = f"{trace} (a batch of {batch})"
    why = _why_not(target, told, course)
    if why or not epochs:
        counts = "so it counts for times and noise only"
        return profile.model_copy(update={"target": target}), f"{run} {why}, {counts}"
    noise = noise_of(course, until=epochs)
    gamma = None if noise is None else gamma_of(noise.scale, batch, PARTS)
    one = ReachedTraining(batch=batch, epochs=epochs, gamma=gamma)
    update = {"target": target, "trainings": (one,), "noise": noise}
    return profile.model_copy(update=update), ""


def _why_not(target: str, told: TimeToTarget, course: TrainingHistory) -> str:
    """Return why a run is no training that came to its target; empty if it is one."""
    if told.epochs is None:
        at = f"{told.nearest.value:g} after {_epochs(told.nearest.epochs)}"
        return f"did not come to {target}; its nearest was {at}"
    if not told.epochs:
        return f"was at {target} before it was trained"
    if told.at_first:
        return (
            f"was at {target} when it was first looked at, after {_epochs(told.epochs)}, so when "
            "it came there is not known (a metric has to fall to its target; look more often)"
        )
    if len(course.batches) > 1:
        batches = ", ".join(map(str, course.batches))
        return f"came to {target} with several global batches ({batches})"
    return ""


def _epochs(epochs: float) -> str:
    return f"{epochs:.4g} epoch{'' if epochs == 1 else 's'}"


def require_target(profiles: Sequence[WorkloadProfile], aim: Aim, told: Iterable[str]) -> None:
    """Raise a `ConfigError` unless some training came to an aim, and all that did to the same."""
    mine = {f"{of} {aim.target:g}" for of in (aim.metric, "training loss")}
    for one in profiles:
        if one.trainings and one.target not in mine:
            raise ConfigError(
                f"the trainings of the profile of {one.made_on} came to "
                f"{one.target or 'an unknown target'}, and the plan is for {aim.metric} "
                f"{aim.target:g}; give that as --target-loss, or leave the profile out"
            )
    if not any(one.trainings for one in profiles):
        why = "; ".join(told) or "no run was given, and no profile has trainings"
        raise ConfigError(
            f"no run came to {aim.metric} {aim.target:g}: {why}. Choose a target that runs came "
            "to, train on, or give --epochs"
        )
