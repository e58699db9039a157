"""The RPC agent of a process, which connects workers and parameter servers.

`torch.distributed.rpc.init_rpc` uses its own store, which needs a port that may not be free; under
torchrun it is the launcher's. It also counts its calls and barriers. A new server and a worker that
had servers before differ in these counts, so they would wait forever. So the agent is created
from its parts here, over the process group's store.

TensorPipe has no authentication. Its messages are pickles, so anyone who reaches an agent's port
can run code. A single request of another protocol, such as HTTP, ends the process. So agents listen
on loopback if all are on one machine, and otherwise on one address.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rpc  # type: ignore[attr-defined]

from evenstride.runtime.host.network_interfaces import address_towards, interface_of
from evenstride.runtime.store.store_server import LOOPBACK

# How often a waiting process checks whether all others are ready.
_LOOK_S = 0.05
# How long agents wait for each other's addresses when all are ready; they hold the GIL meanwhile.
_AGENTS = timedelta(seconds=60)
# Calls that wait for other workers have no timeout; the caller detects failures itself.
_FOREVER_S = 0.0
# Sockets, also within one machine: the threads of the shared-memory transport never sleep and take
# CPU time from the workers (0.05 to 0.3 s per step on two cores; sockets took 0.01 s).
_TRANSPORTS, _CHANNELS = ["uv"], ["basic"]


@dataclass(frozen=True, slots=True)
class RpcRendezvous:
    """The settings by which a run's workers and servers connect."""

    host: str  # of the process group's store
    port: int
    prefix: str  # of the run's own keys
    workers: int  # their number; they have the first ids
    servers: int
    mode: str  # of synchronisation
    timeout_s: float  # how long they wait for each other
    one_machine: bool  # whether all processes are on one machine


def interface_for(rendezvous: RpcRendezvous) -> str | None:
    """Return the interface on which this process' agent listens; ``None`` if unknown."""
    if chosen := os.environ.get("TP_SOCKET_IFNAME"):
        return chosen
    if rendezvous.one_machine:
        return interface_of(LOOPBACK)
    # Gloo's interface reaches the other processes. So does the interface towards the store.
    return os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(
        address_towards(rendezvous.host, rendezvous.port)
    )


def worker_name(rank: int) -> str:
    return f"worker{rank}"


def server_name(index: int) -> str:
    return f"server{index}"


def join(
    rendezvous: RpcRendezvous, name: str, number: int, look: Callable[[], object] = lambda: None
) -> None:
    """Create this process' agent; collective over all workers and servers.

    Agents hold the GIL while they wait for each other. So they are created only after all processes
    have seen that all are ready. ``look`` detects losses before that: it is called repeatedly and
    may raise. ``number`` counts the workers first.

    Raises:
        RuntimeError: another process did not come in time.
    """
    if (interface := interface_for(rendezvous)) is not None:
        os.environ["TP_SOCKET_IFNAME"] = interface
    client = TCPStore(rendezvous.host, rendezvous.port, None, False)
    store = PrefixStore(rendezvous.prefix, client)
    size = rendezvous.workers + rendezvous.servers
    end_s = time.monotonic() + rendezvous.timeout_s
    # Twice: a "ready" process has seen all others, so no process gives up while another waits
    # inside torch.
    for sign in ("there", "ready"):
        look()
        store.set(f"{sign}/{number}", "")
        while missing := [n for n in range(size) if not store.check([f"{sign}/{n}"])]:
            look()
            if time.monotonic() > end_s:
                raise RuntimeError(_late(rendezvous, missing))
            time.sleep(_LOOK_S)
    client.set_timeout(_AGENTS)
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=_FOREVER_S, _transports=_TRANSPORTS, _channels=_CHANNELS
    )
    dist.autograd._init(number)  # type: ignore[attr-defined]
    parts: Any = rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings
        agent = parts.TensorPipeAgent(store, name, number, size, options, {}, [])
    parts.api._init_rpc_states(agent)  # starts it, after all addresses are known


def _late(rendezvous: RpcRendezvous, missing: Sequence[int]) -> str:
    workers = rendezvous.workers
    names = [worker_name(n) if n < workers else server_name(n - workers) for n in missing]
    return (
        f"{', '.join(names)} did not connect within {rendezvous.timeout_s:.0f} s, the process "
        "group's timeout; call watch() on every rank, or set a longer timeout in "
        "init_process_group()"
    )


def reached() -> bool:
    """Return whether this process has an agent."""
    parts: Any = rpc
    return bool(parts.api._is_current_rpc_agent_set())


def part() -> None:
    """End this process' agent, without the other processes."""
    rpc.shutdown(graceful=False)
