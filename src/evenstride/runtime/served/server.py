"""What workers can ask of a parameter server: functions that they call by RPC, in its process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.optim import Optimizer

from evenstride.runtime.served.shard import Settings, Shard, mean_of

Gradients = Sequence[Tensor | None]
Weights = torch.futures.Future[list[Tensor]]


class Server:
    """One server: its part of the parameters, and who of the workers is there.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self.shard = Shard()
        self._workers, self._lock = workers, threading.Lock()
        self._rounds: dict[int, dict[int, tuple[Gradients, Weights]]] = {}
        self._left: set[int] = set()
        self.deserted = threading.Event()  # set when all workers have left

    def begin(self, number: int, optimizer: Optimizer) -> None:
        """Take over an optimizer, unless another worker was first."""
        with self._lock:
            self.shard.begin(number, optimizer)

    def push(self, number: int, worker: int, settings: Settings, gradients: Gradients) -> Weights:
        """Return the weights after a step with all workers' mean gradient, once all have pushed."""
        weights: Weights = torch.futures.Future()
        with self._lock:
            pushed = self._rounds.setdefault(number, {})
            pushed[worker] = gradients, weights
            complete = len(pushed) == self._workers
            if complete:
                del self._rounds[number]
        if complete:
            self._step(number, settings, pushed)
        return weights

    def _step(
        self, number: int, settings: Settings, pushed: dict[int, tuple[Gradients, Weights]]
    ) -> None:
        waiting = [weights for _, weights in pushed.values()]
        try:
            mean = mean_of([pushed[worker][0] for worker in sorted(pushed)])
            stepped = self.shard.step(number, settings, mean)
        except Exception as error:
            for weights in waiting:
                weights.set_exception(error)  # type: ignore[arg-type]
            return
        # No copies: nothing changes them before every worker has got them, and pushed again.
        for weights in waiting:
            weights.set_result(stepped)

    def state(self, number: int) -> list[dict[str, Any]]:
        """Return what an optimizer remembers of its parameters."""
        with self._lock:
            return self.shard.state(number)

    def leave(self, worker: int) -> None:
        """Note that a worker has ended."""
        with self._lock:
            self._left.add(worker)
            if len(self._left) == self._workers:
                self.deserted.set()


_here: list[Server] = []  # the one of this process


def serve(server: Server) -> None:
    """Let workers reach a server in this process."""
    _here[:] = [server]


def begin(number: int, optimizer: Optimizer) -> None:
    """By RPC: `Server.begin`."""
    _here[0].begin(number, optimizer)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(number: int, worker: int, settings: Settings, gradients: Gradients) -> Weights:
    """By RPC: `Server.push`."""
    return _here[0].push(number, worker, settings, gradients)


def state(number: int) -> list[dict[str, Any]]:
    """By RPC: `Server.state`."""
    return _here[0].state(number)


def leave(worker: int) -> None:
    """By RPC: `Server.leave`."""
    _here[0].leave(worker)
