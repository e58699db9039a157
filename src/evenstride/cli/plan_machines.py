"""What ``evenstride plan`` may rent: a catalogue, and the kinds of machines in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from evenstride.cli import arguments
from evenstride.cli.plan_request import PlanRequest
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import read_catalogue, shipped_catalogue
from evenstride.planner.catalogue.live_prices import live_catalogue
from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.caveats import no_machine
from evenstride.planner.search.candidates import Kind, Rentable, rentable
from evenstride.planner.search.infeasible import selected
from evenstride.planner.spot.spot_recordings import recorded_transience, with_recorded
from evenstride.planner.workload.workload_profile import WorkloadProfile


def machines_of(
    asked: PlanRequest, profile: WorkloadProfile, today: date
) -> tuple[Catalogue, Rentable, tuple[Kind, ...]]:
    """Return the catalogue as it was asked for, what is rentable of it, and its kinds.

    Raises:
        ConfigError: something in it is not understood, or nothing fits.
    """
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

    Args:
        kinds: that may be rented.
        recordings: files, each with a type after a colon, or without one for all other types.
        spot: whether spot machines are planned with.

    Raises:
        ConfigError: a file cannot be used, or it is not clear what for.
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
