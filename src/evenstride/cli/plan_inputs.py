"""Make the plan of ``evenstride plan``: its machines, its training, its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from evenstride.cli import arguments
from evenstride.cli.plan_output import Planned
from evenstride.cli.plan_request import PlanRequest, PriceRequest
from evenstride.cli.plan_store import planned_job
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue, shipped_catalogue
from evenstride.planner.catalogue.live_prices import live_catalogue
from evenstride.planner.catalogue.offers import Catalogue, priced_by_memory, selected
from evenstride.planner.caveats import no_machine, of_device, of_spot
from evenstride.planner.make_plan import Plan, batches_about, full_plan, make_plan
from evenstride.planner.search.candidates import Rentable, rentable, with_recorded
from evenstride.planner.search.training_forecast import Kind, TrainingTask
from evenstride.planner.spot_recordings import recorded_transience
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.workload_profile import WorkloadProfile


def planned_for(request: PlanRequest, today: date) -> Planned:
    links, whole = request.network(), _catalogue(request.prices, today)
    job = planned_job(request, whole)
    profile = job.profile
    task = TrainingTask(
        samples=profile.samples,
        epochs=epochs_of(profile, job.epochs),
        gradient_bytes=profile.model.gradient_bytes,
        links=links or profile.links,
        saves=request.saves(),
        servers=request.servers(),
        beside_s=profile.beside_s or 0.0,
    )
    catalogue, machines, kinds = machines_of(request, profile, whole, today)
    made = _made(request, profile, task, kinds)
    # In order of importance: the text shows the first ones.
    caveats = (
        *(f"{part.sentence(today)} (--store off ignores it)" for part in job.reused),
        *_doubts(profile, machines),
        *of_spot(made.chosen.outlook.choice, task.saves),
        *made.caveats,
        *job.notes,
        *_no_spot_price(kinds, request),
        *_outside_of_steps(profile),
    )
    return Planned(replace(made, caveats=caveats), job, catalogue, machines, request.sync)


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
    request: PlanRequest, profile: WorkloadProfile, whole: Catalogue, today: date
) -> tuple[Catalogue, Rentable, tuple[Kind, ...]]:
    """Return the selected catalogue, the machines in it that can be rented, and their kinds."""
    regions, types = map(arguments.names, (request.prices.regions, request.prices.types))
    catalogue = selected(whole, regions, types)
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


def _catalogue(prices: PriceRequest, today: date) -> Catalogue:
    found = _listed_catalogue(prices, today)
    if prices.usd_per_gib_h is None:
        return found
    return priced_by_memory(found, prices.usd_per_gib_h, today)


def _listed_catalogue(prices: PriceRequest, today: date) -> Catalogue:
    if prices.live:
        if prices.catalog is not None:
            raise ConfigError("--catalog and --live both name prices; give one of the two")
        return live_catalogue(today, arguments.names(prices.live))
    return shipped_catalogue() if prices.catalog is None else read_catalogue(prices.catalog)


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


def _no_spot_price(kinds: Sequence[Kind], request: PlanRequest) -> list[str]:
    if not request.spot or any(kind.spot for kind in kinds):
        return []
    return ["no usable machine has a spot price, so --spot changes nothing"]
