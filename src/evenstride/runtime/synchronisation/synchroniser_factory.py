"""Make the synchroniser of a mode on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from evenstride.core.sync_modes.mode_specs import (
    AllReduce,
    Asynchronous,
    LocalSgd,
    ParameterServerMode,
    StaleSynchronous,
    SyncMode,
)
from evenstride.runtime.engines.process_groups import own_group
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.parameter_server.handout_sampler import PieceSampler
from evenstride.runtime.parameter_server.server_calls import connect
from evenstride.runtime.parameter_server.server_worker import AsyncWorker, Synchronous
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.delayed_gradients import DelayedTraining
from evenstride.runtime.synchronisation.local_sgd import LocalTraining, round_position
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.synchronisation.weighted_average import WeightedAverage
from evenstride.runtime.team import Team
from evenstride.runtime.timing.device_timer import RankClock


def synchroniser(
    settings: Settings,
    team: Team,
    failed: Callable[[], Exception | None],
    clock: RankClock,
    progress: CommittedPosition,
    noise: NoiseMeter | None,
) -> Synchroniser | None:
    """Return the synchroniser of a mode; ``None`` if the engine synchronises or for one process.

    ``failed`` returns the error once another rank is lost. ``noise`` then measures the gradients
    that are sent to parameter servers.
    """
    mode = settings.mode
    if isinstance(mode, AllReduce) or team.group is None:
        return None
    if isinstance(mode, ParameterServerMode | Asynchronous | StaleSynchronous):
        assert team.channel is not None, "servers are for several processes"
        one_machine = len({peer.place for peer in team.peers}) == 1
        reach = partial(connect, team.channel, mode, failed, one_machine=one_machine)
        servers = mode.servers
        if isinstance(mode, ParameterServerMode):
            sent = None if noise is None else noise.of_sent()
            return Synchronous(team.rank, team.world_size, servers, reach, sent)
        return AsyncWorker(
            team.rank, team.world_size, progress.global_batch, servers, reach, clock, progress
        )
    place = partial(round_position, progress, settings.max_steps)
    if isinstance(mode, LocalSgd):
        return LocalTraining(mode, partial(_join, team), clock, place)
    join = partial(own_group, team.group, team.channel)
    return DelayedTraining(team.world_size, join, clock, place)


def _join(team: Team) -> WeightedAverage:
    # The first group may use NCCL, so CPU tensors need a second one.
    return WeightedAverage(team.group, own_group(team.group, team.channel, "gloo"))


def free_of(sync: Synchroniser | None) -> AsyncWorker | None:
    """Return the synchroniser if its workers do not run in lockstep, else ``None``."""
    return sync if isinstance(sync, AsyncWorker) else None


def sampler_of(free: AsyncWorker | None) -> Callable[..., StepSampler]:
    return StepSampler if free is None else partial(PieceSampler, free=free)


def facts_of(mode: SyncMode, sync: Synchroniser | None) -> dict[str, Any]:
    free = free_of(sync)
    return {
        "sync": str(mode),
        "forgoes": () if sync is None else mode.forgoes,
        "staleness": None if free is None else free.report(),
    }
