"""Bringing workers and servers together."""

from __future__ import annotations

import logging
import uuid

from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.errors import ConfigError, WorkerLost
from evenstride.runtime.coordination.agreement import agree
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.host.network_interfaces import address_of, is_loopback
from evenstride.runtime.parameter_server.rpc_agent import RpcRendezvous, interface_for, reached
from evenstride.runtime.parameter_server.server_calls import ServerConnections
from evenstride.runtime.store.store_channel import tcp_store
from evenstride.runtime.team import Team

logger = logging.getLogger("evenstride")


def connect(team: Team, mode: SyncMode, gate: DrawBarrier) -> ServerConnections:
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
    # Keys of an earlier Stride in the same store must not be taken for those of this one.
    shown = {"prefix": f"evenstride/servers/{uuid.uuid4().hex}"}
    told = agree(team.channel, "parameter servers", lambda: shown, lambda all_: all_[0], "watch()")
    meeting = RpcRendezvous(
        store.host,
        store.port,
        told["prefix"],
        team.world_size,
        servers,
        str(mode),
        team.channel.timeout.total_seconds(),
        one_machine=len({peer.place for peer in team.peers}) == 1,
    )
    if team.rank == 0:
        _warn_of_open_ports(meeting)
    mine = [i for i in range(servers) if i * team.world_size // servers == team.rank]

    def failed() -> Exception | None:
        return gate.error

    try:
        return ServerConnections(meeting, team.rank, mine, failed)
    except RuntimeError as error:
        raise WorkerLost(
            f"the {servers} parameter servers and {team.world_size} workers did not come together: "
            f"{error}; see what the servers printed above"
        ) from error


def _warn_of_open_ports(meeting: RpcRendezvous) -> None:
    interface = interface_for(meeting)
    address = None if interface is None else address_of(interface)
    if address is None or not is_loopback(address):
        logger.warning(
            "workers and parameter servers listen on %s without a password. Anyone who reaches "
            "these ports can end the run or run code in it. Admit only the machines of this run "
            "(SECURITY.md), or set TP_SOCKET_IFNAME to a private interface",
            f"{address or 'an unknown address'} ({interface or 'unknown interface'})",
        )
