"""The request of ``evenstride plan``, and the workload in the given profiles and runs."""

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
    """The length of the training as given on the command line, by one of three options."""

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
        named = [option for option, present in given.items() if present]
        if len(named) > 1:
            raise ConfigError(
                f"{' and '.join(named)} all set the length of the training; give one of them"
            )
        if self.target_loss is None:
            if self.metric != LOSS:
                raise ConfigError(
                    f"--metric is {self.metric!r} without --target-loss; give the value that it "
                    "must reach, or leave --metric out"
                )
            return None
        return Aim(self.target_loss, self.metric)


@dataclass(frozen=True, slots=True)
class PriceRequest:
    """The prices to plan with, as given on the command line."""

    catalog: Path | None
    live: str
    regions: str
    types: str
    usd_per_gib_h: float | None = None  # prices by memory instead of those of the catalogue


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """The clusters to consider."""

    max_nodes: int
    mixed: bool
    full: bool  # only those that were trained


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of the command line."""

    runs: tuple[Path, ...]
    prices: PriceRequest
    length: TrainingLength
    wishes: Wishes
    spot: bool
    batches: str | None
    clusters: ClusterRequest
    transfer: bool
    links: str | None
    types_of_run: str
    restart: str
    force: bool
    preemptions: tuple[str, ...] = ()
    sync: str = "bsp"
    script: tuple[str, ...] | None = None
    store: str | None = None  # folder of stored profiles, or off

    def saves(self) -> SaveCosts:
        if self.restart and not self.spot:
            raise ConfigError(
                "--restart is about spot machines; add --spot, or leave --restart out"
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
        except ValueError:  # also the base class of pydantic's error
            raise ConfigError(
                f"--links is {self.links!r}: expected milliseconds and Gbit/s, such as 0.1:10"
            ) from None


def wishes_of(
    objective: str | None, deadline: str | None, budget: float | None, confidence: float
) -> Wishes:
    """Return the objective and the limits of a plan."""
    inf = float("inf")
    if budget is not None and not 0 < budget < inf:
        raise ConfigError(f"--budget is {budget}: expected an amount in USD above 0, such as 40")
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
        expected = ", ".join(Objective)
        raise ConfigError(f"--objective is {text!r}: expected one of {expected}") from None


def workload_of(
    request: PlanRequest,
) -> tuple[WorkloadProfile, tuple[WorkloadProfile, ...], list[str]]:
    """Return the workload, what was measured of it, and notes on the runs."""
    measured, notes = _profiles(request)
    profiles = measured
    if request.length.epochs is not None or request.length.trained:
        # The number of epochs is given, so the targets of the profiles do not matter.
        profiles = [one.model_copy(update={"target": ""}) for one in profiles]
    whole = merged(profiles, force=request.force)
    return with_trained(whole, request), tuple(measured), notes


def with_trained(profile: WorkloadProfile, request: PlanRequest) -> WorkloadProfile:
    """Return a profile with the trainings of ``--trained``, if there are any."""
    if not request.length.trained:
        return profile
    return profile.model_copy(update={"trainings": tuple(map(training_of, request.length.trained))})


def _profiles(request: PlanRequest) -> tuple[list[WorkloadProfile], list[str]]:
    """Return the profiles of all inputs, and notes on the runs."""
    aim, profiles, notes = request.length.aim(), list[WorkloadProfile](), list[str]()
    measured = not all(_is_run(path) for path in request.runs)
    for path in _each_once(request.runs):
        if not _is_run(path):
            profiles.append(read_profile(path))
            continue
        _refuse_search(path)
        types = _types(path, request.types_of_run, needed=not measured)
        trace = trace_path(path)
        found = profile_of_run(trace, types)
        found, note = (found, "") if aim is None else towards(found, trace, aim)
        profiles.append(found)
        notes += [note] if note else []
    _check(profiles, request)
    if aim is not None:
        require_target(profiles, aim, notes)
    return profiles, notes


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """Return the paths without repetitions of the same file."""
    found = dict[Path, Path]()
    for path in paths:
        found.setdefault((path / TRACE_NAME if path.is_dir() else path).resolve(), path)
    return list(found.values())


def _refuse_search(path: Path) -> None:
    """Refuse the folder of a search by ``plan --online``, which has several runs."""
    phases = sorted(path.glob(f"phase-*/{TRACE_NAME}"), key=lambda one: one.stat().st_size)
    if phases and not (path / TRACE_NAME).exists():
        raise ConfigError(
            f"{path} is the folder of a search by plan --online and has one run per phase; give "
            f"one of them, such as the longest, {phases[-1].parent}"
        )


def _is_run(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".jsonl"


def _types(path: Path, types: str, *, needed: bool) -> tuple[str, ...]:
    named = arguments.names(types)
    if needed and not named:
        raise ConfigError(
            f"{path} is a run, which does not contain the types of its machines; give --as TYPE, "
            "or a type for each worker, such as --as g5.xlarge,g4dn.xlarge, or add a profile "
            "(evenstride profile), whose times count instead"
        )
    return named


def training_of(text: str) -> ReachedTraining:
    """Return the training that ``--trained`` describes."""
    batch, _, epochs = text.partition(":")
    try:
        return ReachedTraining(batch=int(batch), epochs=float(epochs))
    except ValueError:  # also the base class of pydantic's error
        raise ConfigError(
            f"--trained is {text!r}: expected a batch and the epochs to the target, such as "
            "256:12.5"
        ) from None


def _check(profiles: Sequence[WorkloadProfile], request: PlanRequest) -> None:
    for profile in profiles:
        require_versions(profile, __version__, installed_torch(), force=request.force)
    require_same(profiles, force=request.force)
    # Runs given with a profile contribute noise and links; their batches do not matter.
    own = [profile for profile in profiles if profile.devices] or profiles
    batches = sorted({profile.global_batch for profile in own})
    if request.length.epochs is not None and len(batches) > 1:
        raise ConfigError(
            f"the measured scripts have batches of {' and '.join(map(str, batches))}, so --epochs "
            "is ambiguous; give --trained BATCH:EPOCHS instead (25 % either way are assumed of one "
            "training), or only one of the profiles"
        )


def installed_torch() -> str:
    """Return torch's version without importing it; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
