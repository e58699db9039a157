"""A worker's connection to all parameter servers: bringing them together, calls, signs of life."""

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
from evenstride.runtime.parameter_server.work_dispatcher import taken_for_lost
from evenstride.runtime.store.store_channel import Channel, tcp_store

logger = logging.getLogger("evenstride")

# How often a server that is waited for is asked whether it is there.
EVERY_S = 5.0
# A server that does not answer that for so long hangs: it holds no lock for it.
SILENT_S = 30.0
# How often a worker that waits for a server looks whether another worker was lost.
_LOOK_S = 0.25
# How long servers get to hear of a worker that leaves, in order or not.
_LEAVE_S, _BREAK_S = 10.0, 2.0
# Texts of torch's own errors by which a server that is gone is told from one that refuses.
_OF_CONNECTIONS = ("tensorpipe", "connection", "rpc agent")
# What it needs is imported as by its workers, which is quicker, and not in their first step.
_RUN = "import sys, evenstride._importing as i; i.import_to_train(sys.argv[1]).main()"
_SERVER = "evenstride.runtime.parameter_server.server_process"
# How long a worker that leaves waits for its servers, which end when all have left.
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that this process has started."""

    process: subprocess.Popen[str]

    def close(self, *, wait: bool) -> None:
        """Let it end as soon as all workers have left it, or none asks any more.

        Other workers may need it for longer than this process lives, so a ``wait`` for that has a
        limit.
        """
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.close()
        if wait:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_WAIT_S)


def start(meeting: RpcRendezvous, index: int) -> ServerProcess:
    """Start a server; it joins the meeting by itself.

    Standard input stays open for as long as this process lives, however it ends: a server whose
    worker was killed notices.
    """
    environment = {
        **os.environ,
        # Optimizers of the user's own making are found where the script finds them.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # Each worker that parts would be warned of as a connection that broke.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, _SERVER],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # an interrupt from the keyboard is for the workers
    )
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(json.dumps({**asdict(meeting), "index": index}) + "\n")
    process.stdin.flush()
    return ServerProcess(process)


class Pulse:
    """Asks servers that keep a worker waiting for a sign of life.

    A server may take its time with an answer, since that may depend on other workers. But it
    answers the question whether it is there at once, unless it was stopped, or its machine was cut
    off: then connections stay open, and nothing else would tell.
    """

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, torch.futures.Future[None]]] = {}

    def feel(self, names: Iterable[str]) -> None:
        """Ask these servers, if it is time, and see whether they have answered.

        Raises:
            WorkerLost: one has not for `SILENT_S`.
        """
        now_s = time.monotonic()
        for name in names:
            asked_s, answer = self._asked.get(name, (-EVERY_S, None))
            if answer is not None and not answer.done():
                if now_s - asked_s > SILENT_S:
                    raise WorkerLost(
                        f"parameter {name} has not answered for {SILENT_S:.0f} s: it hangs, or "
                        "its machine cannot be reached; end it and start the run again: with "
                        "checkpoints it goes on from the newest one"
                    )
            elif now_s - asked_s >= EVERY_S:
                self._asked[name] = now_s, rpc.rpc_async(name, ask, args=(Server.alive,))


class KeepAlive:
    """Shows servers that this worker needs them, also while it asks them nothing for long.

    One whose own worker was lost ends when nobody asks it any more, see `server_process`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=_show, args=(names, self._ends), name="evenstride-care", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End it, before this process' agent does."""
        self._ends.set()
        self._thread.join()


def _show(names: Sequence[str], ends: threading.Event) -> None:
    while not ends.wait(EVERY_S):
        for name in names:
            with contextlib.suppress(RuntimeError):  # it is gone: the next call tells
                rpc.rpc_async(name, ask, args=(Server.alive,))


class ServerConnections:
    """The servers, as one worker reaches them; collective to make.

    ``mine`` are the servers that this worker starts. ``failed`` returns why no step can be
    finished, once another worker is known to be lost.
    """

    def __init__(
        self,
        meeting: RpcRendezvous,
        rank: int,
        mine: Sequence[int],
        failed: Callable[[], Exception | None],
    ) -> None:
        self._rank, self._failed = rank, failed
        self._lockstep = sync_from_spec(meeting.mode).lockstep
        self._names = [server_name(index) for index in range(meeting.servers)]
        self._processes: list[ServerProcess] = [start(meeting, index) for index in mine]
        self._closed = self._broken = False
        try:
            join(meeting, worker_name(rank), rank, self._look)
        except BaseException:
            # The servers would wait for this worker, which gives up.
            self._kill()
            raise
        # Where workers go on without one that was lost, its servers must go on as well.
        self._care = None if self._lockstep else KeepAlive(self._names)

    def _look(self) -> None:
        """Raise if the others would be waited for in vain."""
        codes = [process.process.poll() for process in self._processes]
        ended = next((code for code in codes if code is not None), None)
        if ended is not None:
            raise WorkerLost(
                f"a parameter server ended with exit code {ended} before all had met; what it "
                "printed, above, says why"
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
        """Call a method on some servers, with each one's arguments; return their answers.

        Raises:
            WorkerLost: a server is gone or hangs, or another worker that the call waits for is.
        """
        futures: dict[int, torch.futures.Future[Any]] = {}
        for index, own in arguments.items():
            try:
                futures[index] = rpc.rpc_async(self._names[index], ask, args=(method, *own))
            except RuntimeError as error:
                raise self._explained(self._names[index], error) from error
        # Not the future's own wait, which the news of a lost worker could not interrupt.
        arrived = threading.Event()
        together = torch.futures.collect_all(list(futures.values()))
        together.add_done_callback(lambda _: arrived.set())
        pulse = Pulse()
        while not arrived.wait(_LOOK_S):
            lost = self._failed()
            if lost is not None:
                raise lost
            self._feel(pulse, [index for index, own in futures.items() if not own.done()])
        return {index: self._value(self._names[index], each) for index, each in futures.items()}

    def close(self, *, in_order: bool) -> None:
        """Part from the servers. May be called again.

        If all is well (``in_order``), the servers end when all workers have parted.
        """
        if self._closed:
            return
        self._closed = True
        # Its thread makes calls, so it ends before the agent.
        if self._care is not None:
            self._care.close()
        stays = in_order or not (self._lockstep or self._broken)  # the others may go on with them
        for name in self._names if stays else ():
            with contextlib.suppress(RuntimeError):  # the last to leave may find it gone
                limit_s = _LEAVE_S if in_order else _BREAK_S
                rpc.rpc_sync(name, ask, args=(Server.leave, self._rank), timeout=limit_s)
        part()
        if stays:
            for process in self._processes:
                process.close(wait=in_order)
        else:
            self._kill()

    def _feel(self, pulse: Pulse, waited_for: Sequence[int]) -> None:
        try:
            pulse.feel([self._names[index] for index in waited_for])
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
        if isinstance(value, BaseException):  # so an error of a call that had to wait arrives
            raise self._told(value) or UsageError(f"parameter {name} could not: {value}") from value
        return value

    def _told(self, error: BaseException) -> WorkerLost | None:
        """Return that this worker itself was taken for lost, if that is what it was told."""
        text = taken_for_lost(self._rank)
        return WorkerLost(text) if text in str(error) else None

    def _explained(self, name: str, error: RuntimeError) -> Exception:
        if (told := self._told(error)) is not None:
            return told
        text = str(error).lower()
        if not any(sign in text for sign in _OF_CONNECTIONS):
            return error
        self._broken = True  # nobody can go on without it
        return self._failed() or WorkerLost(
            f"parameter {name} is gone, and with it its part of the model; start the run again: "
            "with checkpoints it goes on from the newest one"
        )


def connect(
    channel: Channel, mode: SyncMode, failed: Callable[[], Exception | None], *, one_machine: bool
) -> ServerConnections:
    """Start the servers and reach them; collective.

    Server ``i`` of ``s`` is started by rank ``i * W // s``: where several machines take part, the
    servers are spread over them. ``failed`` returns why no step can be finished, once another
    worker is known to be lost.

    Raises:
        WorkerLost: a server did not come.
    """
    if reached():
        raise ConfigError(
            "this process has an agent of torch.distributed.rpc already, of its own or of another "
            "Stride's parameter servers, and can have one; close() the other Stride, or shut RPC "
            "down, before watch()"
        )
    store = tcp_store(channel.meeting, "parameter servers find the workers by a TCP store")
    servers = mode.servers
    # Keys of an earlier Stride in the same store must not be taken for those of this one.
    shown = {"prefix": f"evenstride/servers/{uuid.uuid4().hex}"}
    told = agree(channel, "parameter servers", lambda: shown, lambda all_: all_[0], "watch()")
    meeting = RpcRendezvous(
        store.host,
        store.port,
        told["prefix"],
        channel.world_size,
        servers,
        str(mode),
        channel.timeout.total_seconds(),
        one_machine,
    )
    if channel.rank == 0:
        _warn_of_open_ports(meeting)
    mine = [i for i in range(servers) if i * channel.world_size // servers == channel.rank]

    try:
        return ServerConnections(meeting, channel.rank, mine, failed)
    except RuntimeError as error:
        raise WorkerLost(
            f"the {servers} parameter servers and {channel.world_size} workers did not come "
            f"together: {error}; see what the servers printed above"
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
