"""Make the plan of ``evenstride plan``: its machines, its training, its caveats."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from evenstride.cli import arguments
from evenstride.cli.plan_output import Planned
from evenstride.cli.plan_request import PlanRequest, workload_of
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue, shipped_catalogue
from evenstride.planner.catalogue.live_prices import live_catalogue
from evenstride.planner.catalogue.offers import Catalogue, selected
from evenstride.planner.caveats import no_machine, of_device, of_spot
from evenstride.planner.make_plan import Plan, batches_about, full_plan, make_plan
from evenstride.planner.search.candidates import Rentable, rentable, with_recorded
from evenstride.planner.search.training_forecast import Kind, TrainingTask
from evenstride.planner.spot_recordings import recorded_transience
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.workload_profile import WorkloadProfile


def planned_for(request: PlanRequest, today: date) -> Planned:
    links = request.network()
    profile, notes = workload_of(request)
    task = TrainingTask(
        samples=profile.samples,
        epochs=epochs_of(profile, request.length.epochs),
        gradient_bytes=profile.model.gradient_bytes,
        links=links or profile.links,
        saves=request.saves(),
        servers=request.servers(),
        beside_s=profile.beside_s or 0.0,
    )
    catalogue, machines, kinds = machines_of(request, profile, today)
    made = _made(request, profile, task, kinds)
    # In order of importance: the text shows the first ones.
    caveats = (
        *_doubts(profile, machines),
        *of_spot(made.chosen.outlook.choice, task.saves),
        *made.caveats,
        *notes,
        *_no_spot_price(kinds, request),
        *_outside_of_steps(profile),
    )
    script = _script(profile) if request.script is None else request.script
    made = replace(made, caveats=caveats)
    return Planned(made, profile, catalogue, machines, request.sync, script)


def _made(
    request: PlanRequest, profile: WorkloadProfile, task: TrainingTask, kinds: Sequence[Kind]
) -> Plan:
    """Return the plan by the full search, or by interpolation between the measurements."""
    given = None if request.batches is None else arguments.wholes(request.batches, "--batches")
    if request.clusters.full:
        wanted = [one for one in profile.clusters if given is None or one.batch in given]
        return full_plan(kinds, task, request.wishes, wanted)
    about = (one.batch for one in profile.trainings)
    batches = batches_about(profile.global_batch, task, about) if given is None else given
    return make_plan(
        kinds,
        task,
        request.wishes,
        batches or (profile.global_batch,),
        most_machines=request.clusters.max_nodes,
        mixed=request.clusters.mixed,
    )


def machines_of(
    request: PlanRequest, profile: WorkloadProfile, today: date
) -> tuple[Catalogue, Rentable, tuple[Kind, ...]]:
    """Return the selected catalogue, the machines in it that can be rented, and their kinds."""
    whole = _catalogue(request, today)
    catalogue = selected(whole, arguments.names(request.regions), arguments.names(request.types))
    machines = rentable(
        catalogue.offers,
        profile.devices,
        today,
        spot=request.spot,
        transfer=request.transfer,
        known_offers=whole.offers,
        force=request.force,
    )
    if not machines.kinds:
        raise ConfigError(no_machine(profile.devices, whole))
    kinds = with_preemptions(machines.kinds, request.preemptions, spot=request.spot)
    return catalogue, machines, kinds


def _catalogue(request: PlanRequest, today: date) -> Catalogue:
    if request.live:
        if request.catalog is not None:
            raise ConfigError("--catalog and --live both name prices; give one of the two")
        return live_catalogue(today, arguments.names(request.live))
    return shipped_catalogue() if request.catalog is None else read_catalogue(request.catalog)


def with_preemptions(
    kinds: Sequence[Kind], recordings: Sequence[str], *, spot: bool
) -> tuple[Kind, ...]:
    """Return kinds of machines with their recorded preemptions.

    Each recording is a file, with a type after a colon, or without one for all other types.
    """
    if recordings and not spot:
        raise ConfigError("--preemptions is about spot machines; add --spot")
    known = {}
    for one in recordings:
        path, name = _parted(one)
        if name in known:
            what = f"of {name}" if name else "of all types"
            raise ConfigError(f"preemptions {what} are given twice; give one file for each type")
        known[name] = recorded_transience(path)
    return with_recorded(kinds, known) if known else tuple(kinds)


def _parted(text: str) -> tuple[Path, str]:
    """Return file and type. A text that names an existing file has no type."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or Path(text).exists():
        return Path(text), ""
    return Path(path), name


def _doubts(profile: WorkloadProfile, machines: Rentable) -> list[str]:
    """Return why measured times may be wrong."""
    found = [doubt for device in profile.devices for doubt in of_device(device)]
    found += [
        f"a CPU computed the steps of {name}; with --force, they count as those of its accelerator"
        for name in machines.pretended
    ]
    return found


def _outside_of_steps(profile: WorkloadProfile) -> list[str]:
    if profile.beside_s is not None:
        return []
    return [
        "the times leave out evaluation and other work outside of steps; to include it, plan with "
        "a run of several epochs and --as"
    ]


def _script(profile: WorkloadProfile) -> tuple[str, ...]:
    """Return the measured script with its arguments; an empty tuple if it is unknown."""
    try:
        return tuple(shlex.split(profile.script))
    except ValueError:  # in an older profile, with a quote in it
        return tuple(profile.script.split())


def _no_spot_price(kinds: Sequence[Kind], request: PlanRequest) -> list[str]:
    if not request.spot or any(kind.spot for kind in kinds):
        return []
    return ["no usable machine has a spot price, so --spot changes nothing"]
