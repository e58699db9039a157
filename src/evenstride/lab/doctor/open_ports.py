"""The ports on which a job's processes listen, and whether other machines can reach them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from evenstride.runtime.host.network_interfaces import is_loopback
from evenstride.runtime.launching.torchrun_agent import is_agent

_SERVER = "evenstride.runtime.parameter_server.server_process"


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a process listens."""

    address: str  # that it is bound to; ``0.0.0.0`` and ``::`` are all addresses of the machine
    port: int  # its number
    process: str  # which one of the job's it is, for people
    pid: int  # process id
    is_open: bool  # whether other machines can reach it, unless a firewall is in between

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def ports_of_jobs() -> list[Port]:
    """Return the ports of all jobs of this user that run on this machine."""
    return ports_of(psutil.process_iter())


def ports_of_rank() -> list[Port]:
    """Return the ports of this rank; local rank 0 adds those of the launcher's agent."""
    me = psutil.Process()
    agent = me.parent() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    return ports_of([me, *filter(None, [agent])])


def ports_of(processes: Iterable[psutil.Process]) -> list[Port]:
    """Return the ports of those processes that belong to a job, each once."""
    found: dict[tuple[str, int], Port] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if role := _role(process):
                for address, number in _listening(process):
                    port = Port(address, number, role, process.pid, not is_loopback(address))
                    found.setdefault((address, number), port)  # children inherit sockets
    return sorted(found.values(), key=lambda port: (port.process, port.pid, port.port))


def tell_ports(ports: list[dict[str, Any]]) -> list[str]:
    """Return lines about ports in their plain form; the last one says what to do."""
    lines = []
    for port in ports:
        where = f"[{port['address']}]" if ":" in port["address"] else port["address"]
        reach = "OPEN to other machines" if port["is_open"] else "this machine only"
        process = f"{port['process']}, pid {port['pid']}"
        lines.append(f"{where + ':' + str(port['port']):22} {process:30} {reach}")
    lines = [f"{'' if n else 'ports':20} {line}" for n, line in enumerate(lines or ["none"])]
    if count := sum(port["is_open"] for port in ports):
        what = "1 port is" if count == 1 else f"{count} ports are"
        lines.append(
            f"{'warning':20} {what} open to other machines, and no port asks for a password: "
            "anyone who reaches them can end the job or run code in it. On one machine, start it "
            "with evenstride launch, which listens on loopback only. On several, close the ports "
            "to all machines but those of the job (SECURITY.md)"
        )
    return lines


def _role(process: psutil.Process) -> str:
    """Return which process of a job it is; nothing if it is none."""
    command = process.cmdline()
    if "--store-only" in command:
        return "store"
    if is_agent("\0".join(command).encode()):
        return "agent"
    variables = process.environ()
    if not {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= variables.keys():
        return ""
    return "parameter server" if _SERVER in command else f"rank {variables['RANK']}"


def _listening(process: psutil.Process) -> Iterator[tuple[str, int]]:
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            yield connection.laddr.ip, connection.laddr.port
