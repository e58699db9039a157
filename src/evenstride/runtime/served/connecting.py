"""Bringing workers and servers together."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from evenstride.core.sync import SyncMode
from evenstride.errors import ConfigError, WorkerLost
from evenstride.runtime.agreement import agree
from evenstride.runtime.channel import tcp_store
from evenstride.runtime.served.agent import Meeting, reached
from evenstride.runtime.served.calls import Servers
from evenstride.runtime.setup import Team


def connect(team: Team, mode: SyncMode, failed: Callable[[], Exception | None]) -> Servers:
    """Start the servers and reach them; collective.

    Server ``i`` of ``s`` is started by rank ``i * W // s``: where several machines take part, the
    servers are spread over them.

    Raises:
        ConfigError: the process group has no store that servers can reach.
        WorkerLost: a server did not come.
    """
    assert team.channel is not None, "servers are for several processes"
    if reached():
        raise ConfigError(
            "this process has an agent of torch.distributed.rpc already, of its own or of another "
            "Stride's parameter servers, and can have one; close() the other Stride, or shut RPC "
            "down, before watch()"
        )
    store = tcp_store(team.channel.meeting, "parameter servers find the workers by a TCP store")
    servers = mode.servers
    shown = {"prefix": f"evenstride/servers/{uuid.uuid4().hex}"}
    told = agree(team.channel, "parameter servers", lambda: shown, lambda all_: all_[0], "watch()")
    meeting = Meeting(
        store.host,
        store.port,
        told["prefix"],
        team.world_size,
        servers,
        str(mode),
        team.channel.timeout.total_seconds(),
    )
    mine = [i for i in range(servers) if i * team.world_size // servers == team.rank]
    try:
        return Servers(meeting, team.rank, mine, failed)
    except RuntimeError as error:
        raise WorkerLost(
            f"the {servers} parameter servers and {team.world_size} workers did not come together: "
            f"{error}; see what the servers printed above"
        ) from error
