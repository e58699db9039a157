"""A worker's connection to all parameter servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import rpc

from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.errors import UsageError, WorkerLost
from evenstride.runtime.parameter_server import server
from evenstride.runtime.parameter_server.keepalive import KeepAlive, Pulse
from evenstride.runtime.parameter_server.rpc_agent import (
    RpcRendezvous,
    join,
    part,
    server_name,
    worker_name,
)
from evenstride.runtime.parameter_server.server_process import ServerProcess, start
from evenstride.runtime.parameter_server.work_dispatcher import taken_for_lost

# How often a worker that waits for a server looks whether another worker was lost.
_LOOK_S = 0.25
# How long servers get to hear of a worker that leaves, in order or not.
_LEAVE_S, _BREAK_S = 10.0, 2.0
# Texts of torch's own errors by which a server that is gone is told from one that refuses.
_OF_CONNECTIONS = ("tensorpipe", "connection", "rpc agent")


class ServerConnections:
    """The servers, as one worker reaches them; collective to make.

    Args:
        meeting: where all meet.
        rank: of this worker.
        mine: the servers that this worker starts.
        failed: returns why no step can be finished, once another worker is known to be lost.
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
        """Raise if the others would be waited for in vain.

        Raises:
            WorkerLost: a server that this worker has started ended, or another worker is lost.
        """
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
        """Whether this worker has parted from them."""
        return self._closed

    def __len__(self) -> int:
        return len(self._names)

    def call(
        self, function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Call a function of `server` on some servers, with each one's arguments, and wait.

        Args:
            function: importable by name.
            arguments: by server.

        Returns:
            What each server answered.

        Raises:
            WorkerLost: a server is gone or hangs, or another worker that the call waits for is.
        """
        futures: dict[int, torch.futures.Future[Any]] = {}
        for index, own in arguments.items():
            try:
                futures[index] = rpc.rpc_async(self._names[index], function, args=own)
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

        Args:
            in_order: whether all is well: then the servers end when all workers have parted.
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
                rpc.rpc_sync(name, server.leave, args=(self._rank,), timeout=limit_s)
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
