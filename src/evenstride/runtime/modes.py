"""From a mode of synchronisation to what carries it out on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from evenstride.core.rounds import Place
from evenstride.core.sync import (
    AllReduce,
    Asynchronous,
    LocalSgd,
    Served,
    StaleSynchronous,
    SyncMode,
)
from evenstride.runtime.delayed import DelayedTraining
from evenstride.runtime.groups import own_group
from evenstride.runtime.joint import Joint
from evenstride.runtime.local_sgd import LocalTraining
from evenstride.runtime.progress import Progress
from evenstride.runtime.sampler import Draw, StepSampler
from evenstride.runtime.served.connecting import connect
from evenstride.runtime.served.free import Free
from evenstride.runtime.served.pieces import PieceSampler
from evenstride.runtime.served.synchronous import Synchronous
from evenstride.runtime.setup import Team
from evenstride.runtime.synchronising import Synchroniser
from evenstride.runtime.timing import StepTimer


def synchroniser(
    mode: SyncMode,
    team: Team,
    failed: Callable[[], Exception | None],
    timer: Callable[[], StepTimer],
    progress: Progress,
    max_steps: int | None = None,
) -> Synchroniser | None:
    """Return what acts around the optimizer's steps; ``None`` where the engine sees to it.

    A single process steps by itself, whatever the mode.

    Args:
        mode: of synchronisation.
        team: of all ranks.
        failed: returns why no step can be finished, once another rank is known to be lost.
        timer: the clock of this rank's steps.
        progress: its position.
        max_steps: steps after which the run ends; ``None`` for no limit.
    """
    if isinstance(mode, AllReduce) or team.group is None:
        return None
    if isinstance(mode, Served | Asynchronous | StaleSynchronous):
        servers, reach = mode.servers, partial(connect, team, mode, failed)
        if isinstance(mode, Served):
            return Synchronous(team.rank, team.world_size, servers, reach)
        return Free(
            team.rank, team.world_size, progress.global_batch, servers, reach, timer, progress
        )
    if isinstance(mode, LocalSgd):
        place = partial(_place, progress, max_steps)
        return LocalTraining(mode, partial(_join, team), timer, place)
    join = partial(own_group, team)
    return DelayedTraining(team.world_size, join, timer, partial(_place, progress, max_steps))


def _join(team: Team) -> Joint:
    return Joint(team.group, own_group(team, "gloo"))


def _place(progress: Progress, max_steps: int | None, draw: Draw) -> Place:
    return Place(
        step=progress.earlier + draw.step,
        position=progress.position,
        window=draw.window,
        end=progress.end,
        global_batch=progress.global_batch,
        last=draw.step + 1 == max_steps,
    )


def free_of(sync: Synchroniser | None) -> Free | None:
    """Return what synchronises, if its workers do not keep step."""
    return sync if isinstance(sync, Free) else None


def sampler_of(free: Free | None) -> Callable[..., StepSampler]:
    """Return what makes the sampler of a training loader."""
    return StepSampler if free is None else partial(PieceSampler, free=free)


def facts_of(mode: SyncMode, sync: Synchroniser | None) -> dict[str, Any]:
    """Return what a summary tells of a mode."""
    free = free_of(sync)
    return {
        "sync": str(mode),
        "forgoes": () if sync is None else mode.forgoes,
        "staleness": None if free is None else free.report(),
    }
