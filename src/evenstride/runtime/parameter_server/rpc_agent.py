"""This process' RPC agent: how workers and parameter servers reach each other.

`torch.distributed.rpc.init_rpc` finds the others by a store of its own, whose port would have to be
free by chance, or is the launcher's under torchrun; and it counts how often it was called, and how
often all have gathered, in which a fresh server and a worker that had servers before differ: they
would wait for ever. So the agent is made from its parts, over the process group's store.

TensorPipe knows no authentication. Its messages are pickles, so whoever reaches an agent's port can
run code, and a single request of another protocol, such as HTTP, ends the process. So agents listen
on loopback where all of them are on one machine, and on one address elsewhere.
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

# How often those who wait for others look whether all are there.
_LOOK_S = 0.05
# How long agents wait for each other's addresses, with the interpreter held, when all are ready.
_AGENTS = timedelta(seconds=60)
# Calls that wait for other workers do so for as long as it takes; who waits watches out itself.
_FOREVER_S = 0.0
# Sockets, also within one machine: the shared memory's threads never sleep, and take the processor
# from the workers (0.05 to 0.3 s a step on two cores, where sockets took 0.01 s).
_TRANSPORTS, _CHANNELS = ["uv"], ["basic"]


@dataclass(frozen=True, slots=True)
class RpcRendezvous:
    """Where a run's workers and servers find each other."""

    host: str  # of the process group's store
    port: int
    prefix: str  # of the keys, this run's own
    workers: int  # how many there are; the first ids are theirs
    servers: int
    mode: str  # of synchronisation
    timeout_s: float  # how long they wait for each other
    one_machine: bool  # whether all of them are on one machine


def interface_for(meeting: RpcRendezvous) -> str | None:
    """Return the interface that this process' agent listens on; ``None`` if it cannot be known."""
    if chosen := os.environ.get("TP_SOCKET_IFNAME"):
        return chosen
    if meeting.one_machine:
        return interface_of(LOOPBACK)
    # Gloo's interface reaches the others. So does the one towards the store.
    return os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(
        address_towards(meeting.host, meeting.port)
    )


def worker_name(rank: int) -> str:
    return f"worker{rank}"


def server_name(index: int) -> str:
    return f"server{index}"


def join(
    meeting: RpcRendezvous, name: str, number: int, look: Callable[[], object] = lambda: None
) -> None:
    """Make this process' agent; collective over all workers and servers.

    Agents wait for each other with the interpreter held, so they are made when all are there, and
    have seen that all are: who is lost before that is found out by ``look``, which is called again
    and again and may raise. Workers are first in ``number``.

    Raises:
        RuntimeError: the others did not come in time.
    """
    if (interface := interface_for(meeting)) is not None:
        os.environ["TP_SOCKET_IFNAME"] = interface
    client = TCPStore(meeting.host, meeting.port, None, False)
    store = PrefixStore(meeting.prefix, client)
    size = meeting.workers + meeting.servers
    end_s = time.monotonic() + meeting.timeout_s
    # Twice: who is "ready" has seen all, so nobody gives up while another waits inside torch.
    for sign in ("there", "ready"):
        look()
        store.set(f"{sign}/{number}", "")
        while missing := [n for n in range(size) if not store.check([f"{sign}/{n}"])]:
            look()
            if time.monotonic() > end_s:
                raise RuntimeError(_late(meeting, missing))
            time.sleep(_LOOK_S)
    client.set_timeout(_AGENTS)
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=_FOREVER_S, _transports=_TRANSPORTS, _channels=_CHANNELS
    )
    dist.autograd._init(number)  # type: ignore[attr-defined]
    parts: Any = rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own making
        agent = parts.TensorPipeAgent(store, name, number, size, options, {}, [])
    parts.api._init_rpc_states(agent)  # starts it, once all have told their addresses


def _late(meeting: RpcRendezvous, missing: Sequence[int]) -> str:
    whom = [
        worker_name(n) if n < meeting.workers else server_name(n - meeting.workers) for n in missing
    ]
    return (
        f"{', '.join(whom)} did not come within {meeting.timeout_s:.0f} s, the process group's "
        "timeout; let every rank call watch(), and give init_process_group() a longer one if they "
        "need it"
    )


def reached() -> bool:
    """Return whether this process has an agent."""
    parts: Any = rpc
    return bool(parts.api._is_current_rpc_agent_set())


def part() -> None:
    """End this process' agent; the others need not be there."""
    rpc.shutdown(graceful=False)
