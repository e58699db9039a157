"""A worker's connections to all parameter servers: start, calls, and liveness checks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import rpc

from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.errors import ConfigError, UsageError, WorkerLost
from evenstride.runtime.coordination.agreement import agree
from evenstride.runtime.host.network_interfaces import address_of, is_loopback
from evenstride.runtime.parameter_server.rpc_agent import (
    RpcRendezvous,
    interface_for,
    join,
    part,
    reached,
    server_name,
    worker_name,
)
from evenstride.runtime.parameter_server.server import Server, ask
from evenstride.runtime.parameter_server.work_dispatcher import declared_lost
from evenstride.runtime.store.store_channel import Channel, tcp_store

logger = logging.getLogger("evenstride")

# How often a waiting worker checks that a server is alive.
EVERY_S = 5.0
# A server that does not answer this check for so long hangs; the check needs no lock.
SILENT_S = 30.0
# How often a worker that waits for a server checks whether another worker was lost.
_LOOK_S = 0.25
# The limits for informing servers that a worker leaves: normally, and after an error.
_LEAVE_S, _BREAK_S = 10.0, 2.0
# Parts of torch's own error messages that mean that a server is gone, not that it refuses.
_OF_CONNECTIONS = ("tensorpipe", "connection", "rpc agent")
# The server imports modules as its workers do, which is faster, and before their first step.
_RUN = "import sys, evenstride._importing as i; i.import_to_train(sys.argv[1]).main()"
_SERVER = "evenstride.runtime.parameter_server.server_process"
# How long a leaving worker waits for its servers, which end when all workers have left.
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that this process has started."""

    process: subprocess.Popen[str]

    def close(self, *, wait: bool) -> None:
        """Let it end when all workers have left or no worker calls it any more.

        Other workers may need it after this process ends, so ``wait`` has a limit.
        """
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.close()
        if wait:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_WAIT_S)


def start(rendezvous: RpcRendezvous, index: int) -> ServerProcess:
    """Start a server, which then joins the rendezvous.

    Its standard input stays open until this process ends, so the server notices if this worker is
    killed.
    """
    environment = {
        **os.environ,
        # Custom optimizers are imported from the same places as in the script.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Otherwise each leaving worker causes a warning about a broken connection.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, _SERVER],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # a keyboard interrupt must only reach the workers
    )
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(json.dumps({**asdict(rendezvous), "index": index}) + "\n")
    process.stdin.flush()
    return ServerProcess(process)


class LivenessCheck:
    """Checks that the servers for which a worker waits are alive.

    An ordinary answer may take long, because it may depend on other workers. But a server answers
    this check at once, unless it is stopped or its machine is cut off. In these cases connections
    stay open, so there is no other symptom.
    """

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, torch.futures.Future[None]]] = {}

    def check(self, names: Iterable[str]) -> None:
        """Send due checks to these servers, and test whether they have answered earlier ones.

        Raises:
            WorkerLost: a server has not answered for `SILENT_S`.
        """
        now_s = time.monotonic()
        for name in names:
            asked_s, answer = self._asked.get(name, (-EVERY_S, None))
            if answer is not None and not answer.done():
                if now_s - asked_s > SILENT_S:
                    raise WorkerLost(
                        f"parameter {name} has not answered for {SILENT_S:.0f} s: it hangs, or "
                        "its machine cannot be reached; end it and restart the run, which "
                        "continues from its newest checkpoint, if it saves checkpoints"
                    )
            elif now_s - asked_s >= EVERY_S:
                self._asked[name] = now_s, rpc.rpc_async(name, ask, args=(Server.alive,))


class KeepAlive:
    """Shows servers that this worker still needs them, even if it makes no other calls for long.

    A server whose own worker was lost ends when it gets no more calls; see `server_process`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=_show, args=(names, self._ends), name="evenstride-keep-alive", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; must be called before this process' agent ends."""
        self._ends.set()
        self._thread.join()


def _show(names: Sequence[str], ends: threading.Event) -> None:
    while not ends.wait(EVERY_S):
        for name in names:
            with contextlib.suppress(RuntimeError):  # a lost server makes the next call fail
                rpc.rpc_async(name, ask, args=(Server.alive,))


class ServerConnections:
    """One worker's connections to the servers; its creation is collective.

    ``mine`` are the servers that this worker starts. ``failed`` returns an error if another worker
    is lost and so no step can complete.
    """

    def __init__(
        self,
        rendezvous: RpcRendezvous,
        rank: int,
        mine: Sequence[int],
        failed: Callable[[], Exception | None],
    ) -> None:
        self._rank, self._failed = rank, failed
        self._lockstep = sync_from_spec(rendezvous.mode).lockstep
        self._names = [server_name(index) for index in range(rendezvous.servers)]
        self._processes: list[ServerProcess] = [start(rendezvous, index) for index in mine]
        self._closed = self._broken = False
        try:
            join(rendezvous, worker_name(rank), rank, self._look)
        except BaseException:
            # Otherwise the servers would wait for this worker, which gives up.
            self._kill()
            raise
        # In asynchronous modes training continues without a lost worker, but needs its servers.
        self._keep_alive = None if self._lockstep else KeepAlive(self._names)

    def _look(self) -> None:
        """Raise if waiting for the other processes is pointless."""
        codes = [process.process.poll() for process in self._processes]
        ended = next((code for code in codes if code is not None), None)
        if ended is not None:
            raise WorkerLost(
                f"a parameter server ended with exit code {ended} before all workers and servers "
                "were connected; see its output above for the cause"
            )
        if (lost := self._failed()) is not None:
            raise lost

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._names)

    def call(
        self, method: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Call a method on some servers, with arguments for each; return their results.

        Raises:
            WorkerLost: a server is lost or hangs, or the call waits for another, lost worker.
        """
        futures: dict[int, torch.futures.Future[Any]] = {}
        for index, own in arguments.items():
            try:
                futures[index] = rpc.rpc_async(self._names[index], ask, args=(method, *own))
            except RuntimeError as error:
                raise self._explained(self._names[index], error) from error
        # Not the future's own wait, which the loss of a worker could not interrupt.
        arrived = threading.Event()
        together = torch.futures.collect_all(list(futures.values()))
        together.add_done_callback(lambda _: arrived.set())
        liveness = LivenessCheck()
        while not arrived.wait(_LOOK_S):
            lost = self._failed()
            if lost is not None:
                raise lost
            self._check(liveness, [index for index, own in futures.items() if not own.done()])
        return {index: self._value(self._names[index], each) for index, each in futures.items()}

    def close(self, *, in_order: bool) -> None:
        """Leave the servers. May be called again.

        Without an error (``in_order``), the servers end when all workers have left.
        """
        if self._closed:
            return
        self._closed = True
        # Its thread makes calls, so it must end before the agent.
        if self._keep_alive is not None:
            self._keep_alive.close()
        stays = in_order or not (self._lockstep or self._broken)  # other workers may need them
        for name in self._names if stays else ():
            with contextlib.suppress(RuntimeError):  # it may have ended already
                limit_s = _LEAVE_S if in_order else _BREAK_S
                rpc.rpc_sync(name, ask, args=(Server.leave, self._rank), timeout=limit_s)
        part()
        if stays:
            for process in self._processes:
                process.close(wait=in_order)
        else:
            self._kill()

    def _check(self, liveness: LivenessCheck, waited_for: Sequence[int]) -> None:
        try:
            liveness.check([self._names[index] for index in waited_for])
        except WorkerLost:
            self._broken = True
            raise

    def _kill(self) -> None:
        for process in self._processes:
            process.process.kill()
            process.process.wait()

    def _value(self, name: str, future: torch.futures.Future[Any]) -> Any:
        try:
            value = future.value()
        except RuntimeError as error:
            raise self._explained(name, error) from error
        if isinstance(value, BaseException):  # errors of calls that had to wait arrive as values
            raise self._as_lost(value) or UsageError(f"parameter {name} failed: {value}") from value
        return value

    def _as_lost(self, error: BaseException) -> WorkerLost | None:
        """Return an error if the servers have declared this worker lost."""
        text = declared_lost(self._rank)
        return WorkerLost(text) if text in str(error) else None

    def _explained(self, name: str, error: RuntimeError) -> Exception:
        if (lost := self._as_lost(error)) is not None:
            return lost
        text = str(error).lower()
        if not any(sign in text for sign in _OF_CONNECTIONS):
            return error
        self._broken = True  # no worker can continue without it
        return self._failed() or WorkerLost(
            f"parameter {name} is lost, and its part of the model with it; restart the run, which "
            "continues from its newest checkpoint, if it saves checkpoints"
        )


def connect(
    channel: Channel, mode: SyncMode, failed: Callable[[], Exception | None], *, one_machine: bool
) -> ServerConnections:
    """Start the servers and connect to them; collective.

    Rank ``i * W // s`` starts server ``i`` of ``s``, so that servers are spread over the machines.
    ``failed`` returns an error if another worker is lost and so no step can complete.

    Raises:
        WorkerLost: a server did not connect.
    """
    if reached():
        raise ConfigError(
            "this process already has a torch.distributed.rpc agent, its own or that of another "
            "Stride's parameter servers, and can have only one; close() the other Stride, or shut "
            "down RPC, before watch()"
        )
    store = tcp_store(channel.meeting, "parameter servers connect through a TCP store")
    servers = mode.servers
    # Unique, so that keys of an earlier Stride in the same store do not count.
    shown = {"prefix": f"evenstride/servers/{uuid.uuid4().hex}"}
    agreed = agree(channel, "parameter servers", lambda: shown, lambda all_: all_[0], "watch()")
    rendezvous = RpcRendezvous(
        store.host,
        store.port,
        agreed["prefix"],
        channel.world_size,
        servers,
        str(mode),
        channel.timeout.total_seconds(),
        one_machine,
    )
    if channel.rank == 0:
        _warn_of_open_ports(rendezvous)
    mine = [i for i in range(servers) if i * channel.world_size // servers == channel.rank]

    try:
        return ServerConnections(rendezvous, channel.rank, mine, failed)
    except RuntimeError as error:
        raise WorkerLost(
            f"the {servers} parameter server(s) and {channel.world_size} workers could not "
            f"connect: {error}; see the servers' output above"
        ) from error


def _warn_of_open_ports(rendezvous: RpcRendezvous) -> None:
    interface = interface_for(rendezvous)
    address = None if interface is None else address_of(interface)
    if address is None or not is_loopback(address):
        logger.warning(
            "workers and parameter servers listen on %s without authentication. Anyone who reaches "
            "these ports can end the run or run code in it. Allow only the machines of this run "
            "(SECURITY.md), or set TP_SOCKET_IFNAME to a private interface",
            f"{address or 'an unknown address'} ({interface or 'unknown interface'})",
        )
