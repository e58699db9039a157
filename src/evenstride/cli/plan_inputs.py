"""The plan that ``evenstride plan`` makes of what it is asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from evenstride.cli import arguments
from evenstride.cli.plan_machines import machines_of
from evenstride.cli.plan_output import Planned
from evenstride.cli.plan_request import PlanRequest
from evenstride.cli.plan_workload import workload_of
from evenstride.planner.caveats import of_device, of_spot
from evenstride.planner.make_plan import batches_about, make_plan
from evenstride.planner.search.candidates import Kind, Rentable
from evenstride.planner.search.step_time import servers_of
from evenstride.planner.search.training_forecast import TrainingTask
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.workload_profile import WorkloadProfile


def planned_for(asked: PlanRequest, today: date) -> Planned:
    """Return the plan that is asked for.

    Raises:
        ConfigError: something in it is not understood, or nothing fits.
    """
    links = asked.network()
    profile, told = workload_of(asked)
    task = TrainingTask(
        samples=profile.samples,
        epochs=epochs_of(profile, asked.length.epochs),
        gradient_bytes=profile.model.gradient_bytes,
        links=links or profile.links,
        saves=asked.saves(),
        servers=servers_of(asked.sync),
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
