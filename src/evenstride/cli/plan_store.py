"""The store of ``evenstride plan``: what it adds to a job, and what it keeps of it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstride._version import __version__
from evenstride.cli.plan_request import PlanRequest, installed_torch, with_trained, workload_of
from evenstride.core.formatting import listed
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.caveats import of_accelerator
from evenstride.planner.workload.model_reuse import Reuse, ReusedPart, completed
from evenstride.planner.workload.model_store import (
    ModelStore,
    keep,
    of_script,
    read_store,
    script_of,
    store_folder,
    words_of,
)
from evenstride.planner.workload.target_runs import require_target
from evenstride.planner.workload.workload_profile import WorkloadProfile

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """The workload of a plan, with what the store adds."""

    profile: WorkloadProfile
    epochs: float | None  # at its own batch, unless its trainings contain them
    script: tuple[str, ...]  # and its arguments; empty if unknown
    reused: tuple[ReusedPart, ...] = ()
    stored: tuple[Path, ...] = ()  # files of the store that were written
    notes: tuple[str, ...] = ()  # on runs, and on the store


def planned_job(request: PlanRequest, catalogue: Catalogue) -> PlannedJob:
    """Return the workload of runs and profiles, or of ``--script``, completed by the store.

    Only types on offer are added, and no times of a CPU for a type with an accelerator.
    """
    folder, notes = store_folder(request.store, os.environ), list[str]()
    parts, stored, store = tuple[ReusedPart, ...](), tuple[Path, ...](), ModelStore(Path())
    if folder is not None:
        store = read_store(folder, __version__, installed_torch(), force=request.force)
    if request.runs:
        profile, measured, notes = workload_of(request)
        # With --force, profiles may be of other jobs or other machines than they say.
        if folder is not None and not request.force:
            stored, failed = _kept(measured, folder)
            notes += failed
    else:
        profile, parts = _of_script(request, store)
    found = Reuse(profile, None)
    if not request.length.trained:
        offered = {offer.instance_type for offer in catalogue.offers}
        found = completed(
            profile,
            request.length.epochs,
            store.models,
            lambda one: one.type in offered and not of_accelerator(one, catalogue),
        )
    if (aim := request.length.aim()) is not None and not request.runs:
        require_target([found.profile], aim, ())
    script = words_of(profile) if request.script is None else request.script
    return PlannedJob(
        found.profile,
        found.epochs,
        script,
        (*parts, *found.parts),
        stored,
        (*notes, *store.skipped),
    )


def _kept(profiles: Sequence[WorkloadProfile], folder: Path) -> tuple[tuple[Path, ...], list[str]]:
    """Store what was measured; return the files that changed, and why others could not."""
    script, files = next((one.script for one in profiles if one.script), ""), dict[Path, None]()
    for one in profiles:
        # A run does not contain its command, but is of the same workload as the profile.
        named = one if one.script else one.model_copy(update={"script": script})
        try:
            file = keep(named, folder)
        except ConfigError as error:
            return tuple(files), [str(error)]
        files |= {} if file is None else {file: None}
    return tuple(files), []


def _of_script(
    request: PlanRequest, store: ModelStore
) -> tuple[WorkloadProfile, tuple[ReusedPart, ...]]:
    """Return the stored workload of ``--script``."""
    if not request.script or store.folder == Path():
        raise ConfigError(
            "no profile and no run given: expected at least one, such as evenstride plan "
            "profile.json, or --script 'train.py --lr 0.1' with a store, for a job that was "
            "measured before"
        )
    found = of_script(request.script, store.models)
    if not found:
        known = sorted({script_of(one.profile) for one in store.models} - {""})
        raise ConfigError(
            f"the store {store.folder} has no step times of {request.script[0]} (it has "
            f"{listed(known, _MOST_NAMED) or 'none'}); measure it first: evenstride profile -- "
            f"{shlex.join(request.script)}"
        )
    model, like = found[0]
    part = ReusedPart("the whole job", (model,), like)
    return with_trained(model.profile, request), (part,)
