"""The plan that ``evenstride plan`` makes: of which machines, and for which training."""

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
from evenstride.planner.make_plan import batches_about, make_plan
from evenstride.planner.search.candidates import Rentable, rentable, with_recorded
from evenstride.planner.search.training_forecast import Kind, TrainingTask
from evenstride.planner.spot_recordings import recorded_transience
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.workload_profile import WorkloadProfile


def planned_for(asked: PlanRequest, today: date) -> Planned:
    links = asked.network()
    profile, told = workload_of(asked)
    task = TrainingTask(
        samples=profile.samples,
        epochs=epochs_of(profile, asked.length.epochs),
        gradient_bytes=profile.model.gradient_bytes,
        links=links or profile.links,
        saves=asked.saves(),
        servers=asked.servers(),
        beside_s=profile.beside_s or 0.0,
    )
    batches = (
        batches_about(profile.global_batch, task, (one.batch for one in profile.trainings))
        if asked.batches is None
        else arguments.wholes(asked.batches, "--batches")
    )
    catalogue, machines, kinds = machines_of(asked, profile, today)
    made = make_plan(
        kinds,
        task,
        asked.wishes,
        batches or (profile.global_batch,),
        most_machines=asked.max_nodes,
        mixed=asked.mixed,
    )
    doubts = (*_doubts(profile, machines), *of_spot(made.chosen.outlook.choice, task.saves))
    made = replace(made, caveats=(*doubts, *made.caveats, *told, *_spotless(kinds, asked)))
    script = _script(profile) if asked.script is None else asked.script
    return Planned(made, profile, catalogue, machines, asked.sync, script)


def machines_of(
    asked: PlanRequest, profile: WorkloadProfile, today: date
) -> tuple[Catalogue, Rentable, tuple[Kind, ...]]:
    """Return the catalogue as it was asked for, what is rentable of it, and its kinds."""
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
    return catalogue, machines, kinds


def _catalogue(asked: PlanRequest, today: date) -> Catalogue:
    if asked.live:
        if asked.catalog is not None:
            raise ConfigError("prices are asked for twice; give --catalog or --live")
        return live_catalogue(today, arguments.names(asked.live))
    return shipped_catalogue() if asked.catalog is None else read_catalogue(asked.catalog)


def with_preemptions(
    kinds: Sequence[Kind], recordings: Sequence[str], *, spot: bool
) -> tuple[Kind, ...]:
    """Return kinds of machines with the losses that were recorded of them.

    Each recording is a file, with a type after a colon, or without one for all other types.
    """
    if recordings and not spot:
        raise ConfigError("--preemptions tells of spot machines; give --spot as well")
    known = {}
    for one in recordings:
        path, name = _parted(one)
        if name in known:
            what = f"of {name}" if name else "of all types"
            raise ConfigError(f"losses {what} are given twice; give one --preemptions for a type")
        known[name] = recorded_transience(path)
    return with_recorded(kinds, known) if known else tuple(kinds)


def _parted(text: str) -> tuple[Path, str]:
    """Return file and type; what is there as a file is no type."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or Path(text).exists():
        return Path(text), ""
    return Path(path), name


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
