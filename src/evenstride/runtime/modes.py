"""From a mode of synchronisation to what carries it out on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from evenstride.core.sync import AllReduce, Served, SyncMode
from evenstride.runtime.served.connecting import connect
from evenstride.runtime.served.synchronous import Synchronous
from evenstride.runtime.setup import Team
from evenstride.runtime.synchronising import Synchroniser


def synchroniser(
    mode: SyncMode,
    team: Team,
    failed: Callable[[], Exception | None],
    waiting: Callable[[], AbstractContextManager[None]],
) -> Synchroniser | None:
    """Return what acts around the optimizer's steps; ``None`` where the engine sees to it.

    A single process steps by itself, whatever the mode.

    Args:
        mode: of synchronisation.
        team: of all ranks.
        failed: returns why no step can be finished, once another rank is known to be lost.
        waiting: a context in which this rank's time is not its own work.
    """
    del waiting
    if isinstance(mode, AllReduce) or team.group is None:
        return None
    if isinstance(mode, Served):
        return Synchronous(
            team.rank, team.world_size, mode.servers, lambda: connect(team, mode.servers, failed)
        )
    raise NotImplementedError(mode)
