"""What ``evenstride plan`` is asked for, and what the given profiles and runs tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenstride._version import __version__
from evenstride.cli import arguments
from evenstride.errors import ConfigError
from evenstride.planner.search.selection import Objective, Wishes
from evenstride.planner.search.training_forecast import USUAL_SAVES
from evenstride.planner.spot_losses import SaveCosts
from evenstride.planner.workload.from_trace import profile_of_run
from evenstride.planner.workload.step_time import servers_of
from evenstride.planner.workload.target_runs import LOSS, Aim, require_target, towards
from evenstride.planner.workload.workload_profile import (
    Links,
    ReachedTraining,
    WorkloadProfile,
    merged,
    read_profile,
    require_same,
    require_versions,
)
from evenstride.trace.read import TRACE_NAME, trace_path


@dataclass(frozen=True, slots=True)
class TrainingLength:
    """How long training lasts, as on the command line, where one of three options says it."""

    epochs: float | None
    trained: tuple[str, ...]
    target_loss: float | None
    metric: str

    def aim(self) -> Aim | None:
        given = {
            "--epochs": self.epochs is not None,
            "--trained": bool(self.trained),
            "--target-loss": self.target_loss is not None,
        }
        named = [option for option, there in given.items() if there]
        if len(named) > 1:
            raise ConfigError(
                f"how long training lasts is said twice; give {' or '.join(named)}, not both"
            )
        if self.target_loss is None:
            if self.metric != LOSS:
                raise ConfigError(
                    f"--metric is {self.metric!r}, and no --target-loss says what it is to come "
                    "to; give that, or leave --metric out"
                )
            return None
        return Aim(self.target_loss, self.metric)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for, as on the command line; see there."""

    runs: tuple[Path, ...]
    catalog: Path | None
    length: TrainingLength
    wishes: Wishes
    spot: bool
    batches: str | None
    max_nodes: int
    mixed: bool
    regions: str
    types: str
    transfer: bool
    links: str | None
    types_of_run: str
    restart: str
    live: str
    force: bool
    preemptions: tuple[str, ...] = ()
    sync: str = "bsp"
    script: tuple[str, ...] | None = None

    def saves(self) -> SaveCosts:
        if self.restart and not self.spot:
            raise ConfigError(
                "--restart tells of spot machines; give --spot as well, or leave it out"
            )
        each = arguments.names(self.restart)
        restarts_s = tuple(arguments.seconds(one, "--restart") for one in each)
        return replace(USUAL_SAVES, restart_s=restarts_s) if restarts_s else USUAL_SAVES

    def servers(self) -> int:
        return servers_of(self.sync)

    def network(self) -> Links | None:
        if self.links is None:
            return None
        latency, _, bandwidth = self.links.partition(":")
        try:
            return Links(latency_s=float(latency) / 1e3, bytes_per_s=float(bandwidth) * 1e9 / 8)
        except ValueError:  # pydantic's is one, too
            raise ConfigError(
                f"--links is {self.links!r}; give milliseconds and Gbit/s, such as 0.1:10"
            ) from None


def wishes_of(
    objective: str | None, deadline: str | None, budget: float | None, confidence: float
) -> Wishes:
    """Return what a plan is to be good at, and its limits."""
    inf = float("inf")
    if budget is not None and not 0 < budget < inf:
        raise ConfigError(f"--budget is {budget}; give an amount in USD above 0, such as 40")
    return Wishes(
        None if objective is None else _objective(objective),
        inf if deadline is None else arguments.seconds(deadline, "--deadline"),
        inf if budget is None else budget,
        confidence,
    )


def _objective(text: str) -> Objective:
    try:
        return Objective(text)
    except ValueError:
        raise ConfigError(f"--objective is {text!r}; it can be {', '.join(Objective)}") from None


def workload_of(asked: PlanRequest) -> tuple[WorkloadProfile, list[str]]:
    """Return what is to be trained, and what is to be known of the runs that tell it."""
    profiles, told = _profiles(asked)
    if asked.length.epochs is not None or asked.length.trained:
        # Epochs are given, so it does not matter what the trainings of the profiles came to.
        profiles = [one.model_copy(update={"target": ""}) for one in profiles]
    profile = merged(profiles, force=asked.force)
    if asked.length.trained:
        profile = profile.model_copy(
            update={"trainings": tuple(map(_training, asked.length.trained))}
        )
    return profile, told


def _profiles(asked: PlanRequest) -> tuple[list[WorkloadProfile], list[str]]:
    """Return what the runs and profiles tell, and what is to be known of the runs."""
    aim, profiles, told = asked.length.aim(), list[WorkloadProfile](), list[str]()
    measured = not all(_is_run(path) for path in asked.runs)
    for path in _each_once(asked.runs):
        if not _is_run(path):
            profiles.append(read_profile(path))
            continue
        _refuse_a_search(path)
        types = _types(path, asked.types_of_run, needed=not measured)
        trace = trace_path(path)
        found = profile_of_run(trace, types)
        found, note = (found, "") if aim is None else towards(found, trace, aim)
        profiles.append(found)
        told += [note] if note else []
    _check(profiles, asked)
    if aim is not None:
        require_target(profiles, aim, told)
    return profiles, told


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return paths without those that lead to the same file as an earlier one."""
    found = dict[Path, Path]()
    for path in paths:
        found.setdefault((path / TRACE_NAME if path.is_dir() else path).resolve(), path)
    return list(found.values())


def _refuse_a_search(path: Path) -> None:
    """Refuse the folder of a search, which has several runs."""
    phases = sorted(path.glob(f"phase-*/{TRACE_NAME}"), key=lambda one: one.stat().st_size)
    if phases and not (path / TRACE_NAME).exists():
        raise ConfigError(
            f"{path} is of a search by plan --online, with a run in each of its phases; give one "
            f"of them, such as the longest, {phases[-1].parent}"
        )


def _is_run(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".jsonl"


def _types(path: Path, types: str, *, needed: bool) -> tuple[str, ...]:
    named = arguments.names(types)
    if needed and not named:
        raise ConfigError(
            f"{path} is a run, which does not say what its machines are called; give --as TYPE, or "
            "a type for each worker, such as --as g5.xlarge,g4dn.xlarge, or a profile beside it "
            "(evenstride profile), whose times count then"
        )
    return named


def _training(text: str) -> ReachedTraining:
    batch, _, epochs = text.partition(":")
    try:
        return ReachedTraining(batch=int(batch), epochs=float(epochs))
    except ValueError:  # pydantic's is one, too
        raise ConfigError(
            f"--trained is {text!r}; give a batch and the epochs it took to the target, such as "
            "256:12.5"
        ) from None


def _check(profiles: Sequence[WorkloadProfile], asked: PlanRequest) -> None:
    for profile in profiles:
        require_versions(profile, __version__, installed_torch(), force=asked.force)
    require_same(profiles, force=asked.force)
    # Runs beside a profile tell of noise and links, at whatever batch they trained.
    own = [profile for profile in profiles if profile.devices] or profiles
    batches = sorted({profile.global_batch for profile in own})
    if asked.length.epochs is not None and len(batches) > 1:
        raise ConfigError(
            f"what was measured are scripts with batches of {' and '.join(map(str, batches))}, so "
            "it is not clear at which of them --epochs counts; give --trained BATCH:EPOCHS instead "
            "(of one training, 25 % either way are assumed), or leave out all but one"
        )


def installed_torch() -> str:
    """Return torch's version without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
