"""What ``evenstride plan`` does with what it is asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from evenstride._version import __version__
from evenstride.cli import arguments
from evenstride.cli.plan_output import Planned
from evenstride.cli.preemption_files import with_preemptions
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue, shipped_catalogue
from evenstride.planner.catalogue.live_prices import live_catalogue
from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.caveats import no_machine, of_device, of_spot
from evenstride.planner.make_plan import batches_about, make_plan
from evenstride.planner.search.all_reduce_time import servers_of
from evenstride.planner.search.candidates import Kind, Rentable, rentable
from evenstride.planner.search.infeasible import selected
from evenstride.planner.search.objective import Objective, Wishes
from evenstride.planner.search.training_forecast import USUAL_SAVES, TrainingTask
from evenstride.planner.spot.restart_cost import SaveCosts
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.from_trace import profile_of_run
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

_Chosen = TypeVar("_Chosen", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for, as on the command line; see there."""

    runs: tuple[Path, ...]
    catalog: Path | None
    epochs: float | None
    deadline: str | None
    budget: float | None
    objective: str | None
    confidence: float
    spot: bool
    batches: str | None
    max_nodes: int
    mixed: bool
    regions: str
    types: str
    transfer: bool
    links: str | None
    trained: tuple[str, ...]
    target_loss: float | None
    metric: str
    types_of_run: str
    restart: str
    live: str
    force: bool
    preemptions: tuple[str, ...] = ()
    sync: str = "bsp"
    script: tuple[str, ...] | None = None


def planned_for(asked: PlanRequest, today: date) -> Planned:
    """Return the plan that is asked for.

    Raises:
        ConfigError: something in it is not understood, or nothing fits.
    """
    wishes, links = _wishes(asked), _links(asked.links)
    profile, told = _workload(asked)
    epochs = epochs_of(profile, asked.epochs)
    task = TrainingTask(
        *(profile.samples, epochs, profile.model.gradient_bytes, links or profile.links),
        *(_saves(asked), servers_of(asked.sync), profile.beside_s or 0.0),
    )
    batches = (
        batches_about(profile.global_batch, task, (one.batch for one in profile.trainings))
        if asked.batches is None
        else arguments.wholes(asked.batches, "--batches")
    )
    whole = _catalogue(asked, today)
    catalogue = selected(whole, arguments.names(asked.regions), arguments.names(asked.types))
    machines = rentable(
        catalogue.offers,
        profile.devices,
        today,
        spot=asked.spot,
        transfer=asked.transfer,
        known_offers=whole.offers,
        force=asked.force,
    )
    if not machines.kinds:
        raise ConfigError(no_machine(profile.devices, whole))
    kinds = with_preemptions(machines.kinds, asked.preemptions, spot=asked.spot)
    made = make_plan(
        kinds,
        task,
        wishes,
        batches or (profile.global_batch,),
        most_machines=asked.max_nodes,
        mixed=asked.mixed,
    )
    doubts = (*_doubts(profile, machines), *of_spot(made.chosen.outlook.choice, task.saves))
    made = replace(made, caveats=(*doubts, *made.caveats, *told, *_spotless(kinds, asked)))
    script = _script(profile) if asked.script is None else asked.script
    return Planned(made, profile, catalogue, machines, asked.sync, script)


def _doubts(profile: WorkloadProfile, machines: Rentable) -> list[str]:
    """Return why times may be others than they look."""
    told = [doubt for device in profile.devices for doubt in of_device(device)]
    told += [
        f"steps of {name} were computed by a processor, and count as those of its accelerator, as "
        "--force asks for"
        for name in machines.pretended
    ]
    if profile.beside_s is None:
        told.append(
            "what an epoch takes beside its steps, such as evaluation, was not measured (a run of "
            "several epochs tells, with --as), and is not in the times"
        )
    return told


def _script(profile: WorkloadProfile) -> tuple[str, ...]:
    """Return the script that was measured, with its arguments; none if it is not known."""
    try:
        return tuple(shlex.split(profile.script))
    except ValueError:  # of an older profile, with a quote in it
        return tuple(profile.script.split())


def _spotless(kinds: Sequence[Kind], asked: PlanRequest) -> list[str]:
    if not asked.spot or any(kind.spot for kind in kinds):
        return []
    return ["no machine that could be planned with has a spot price, so --spot changes nothing"]


def _wishes(asked: PlanRequest) -> Wishes:
    inf = float("inf")
    if asked.budget is not None and not 0 < asked.budget < inf:
        raise ConfigError(f"--budget is {asked.budget}; give an amount in USD above 0, such as 40")
    return Wishes(
        None if asked.objective is None else _one_of(Objective, asked.objective, "--objective"),
        inf if asked.deadline is None else arguments.seconds(asked.deadline, "--deadline"),
        inf if asked.budget is None else asked.budget,
        asked.confidence,
    )


def _check(profiles: Sequence[WorkloadProfile], asked: PlanRequest) -> None:
    for profile in profiles:
        require_versions(profile, __version__, installed_torch(), force=asked.force)
    require_same(profiles, force=asked.force)
    # Runs beside a profile tell of noise and links, at whatever batch they trained.
    own = [profile for profile in profiles if profile.devices] or profiles
    batches = sorted({profile.global_batch for profile in own})
    if asked.epochs is not None and len(batches) > 1:
        raise ConfigError(
            f"what was measured are scripts with batches of {' and '.join(map(str, batches))}, so "
            "it is not clear at which of them --epochs counts; give --trained BATCH:EPOCHS instead "
            "(of one training, 25 % either way are assumed), or leave out all but one"
        )


def _catalogue(asked: PlanRequest, today: date) -> Catalogue:
    if asked.live:
        if asked.catalog is not None:
            raise ConfigError("prices are asked for twice; give --catalog or --live")
        return live_catalogue(today, arguments.names(asked.live))
    return shipped_catalogue() if asked.catalog is None else read_catalogue(asked.catalog)


def _saves(asked: PlanRequest) -> SaveCosts:
    if asked.restart and not asked.spot:
        raise ConfigError("--restart tells of spot machines; give --spot as well, or leave it out")
    each = arguments.names(asked.restart)
    restarts_s = tuple(arguments.seconds(one, "--restart") for one in each)
    return replace(USUAL_SAVES, restart_s=restarts_s) if restarts_s else USUAL_SAVES


def _workload(asked: PlanRequest) -> tuple[WorkloadProfile, list[str]]:
    """Return what is to be trained, and what is to be known of the runs that tell it."""
    profiles, told = _profiles(asked)
    if asked.epochs is not None or asked.trained:
        # Epochs are given, so it does not matter what the trainings of the profiles came to.
        profiles = [one.model_copy(update={"target": ""}) for one in profiles]
    profile = merged(profiles, force=asked.force)
    if asked.trained:
        profile = profile.model_copy(update={"trainings": tuple(map(_training, asked.trained))})
    return profile, told


def _profiles(asked: PlanRequest) -> tuple[list[WorkloadProfile], list[str]]:
    """Return what the runs and profiles tell, and what is to be known of the runs."""
    aim, profiles, told = _aim(asked), list[WorkloadProfile](), list[str]()
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


def _aim(asked: PlanRequest) -> Aim | None:
    given = {
        "--epochs": asked.epochs is not None,
        "--trained": bool(asked.trained),
        "--target-loss": asked.target_loss is not None,
    }
    named = [option for option, there in given.items() if there]
    if len(named) > 1:
        raise ConfigError(
            f"how long training lasts is said twice; give {' or '.join(named)}, not both"
        )
    if asked.target_loss is None:
        if asked.metric != LOSS:
            raise ConfigError(
                f"--metric is {asked.metric!r}, and no --target-loss says what it is to come to; "
                "give that, or leave --metric out"
            )
        return None
    return Aim(asked.target_loss, asked.metric)


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


def _links(text: str | None) -> Links | None:
    if text is None:
        return None
    latency, _, bandwidth = text.partition(":")
    try:
        found = Links(latency_s=float(latency) / 1e3, bytes_per_s=float(bandwidth) * 1e9 / 8)
    except ValueError:  # pydantic's is one, too
        raise ConfigError(
            f"--links is {text!r}; give milliseconds and Gbit/s, such as 0.1:10"
        ) from None
    return found


def _one_of(kind: type[_Chosen], text: str, option: str) -> _Chosen:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; it can be {', '.join(kind)}") from None


def installed_torch() -> str:
    """Return torch's version without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
