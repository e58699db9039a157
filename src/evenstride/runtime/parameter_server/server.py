"""What workers can ask of a parameter server: functions that they call by RPC, in its process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.optim import Optimizer

from evenstride.core.sync_modes.mode_specs import rate_factor
from evenstride.runtime.parameter_server.parameter_shard import Settings, Shard, mean_of
from evenstride.runtime.parameter_server.work_dispatcher import (
    Answer,
    Turn,
    WorkDispatcher,
    taken_for_lost,
)

Gradients = Sequence[Tensor | None]
Weights = torch.futures.Future[list[Tensor]]


class Server:
    """One server: its part of the parameters, and who of the workers is there.

    Args:
        workers: how many there are.
        office: on the first server, where workers do not keep step.
        rate: how the step size of an update depends on its staleness; see `rate_factor`.
    """

    def __init__(
        self, workers: int, office: WorkDispatcher | None = None, rate: str = "constant"
    ) -> None:
        self.shard, self.office, self._rate = Shard(), office, rate
        self._workers, self._lock = workers, threading.Lock()
        self._updates, self._pulled = 0, [0] * workers
        self.calls = 0  # so far; tells whether anybody needs this server
        self._rounds: dict[int, dict[int, tuple[Gradients, Weights]]] = {}
        self._left: set[int] = set()
        self.deserted = threading.Event()  # set when all workers have left

    def begin(self, number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
        """Take over an optimizer, unless another worker was first."""
        with self._lock:
            self.shard.begin(number, optimizer, keys)

    def called(self) -> None:
        """Note that somebody needs this server."""
        self.calls += 1

    def push(self, number: int, worker: int, settings: Settings, gradients: Gradients) -> Weights:
        """Return the weights after a step with all workers' mean gradient, once all have pushed.

        Raises:
            RuntimeError: a worker has ended, for which the others would wait.
        """
        self.calls += 1
        weights: Weights = torch.futures.Future()
        with self._lock:  # who leaves tells all that wait by then
            if self._left:
                raise RuntimeError(_ended(self._left))
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
            # All workers wait for this one step, so all have to hear of its error.
            for weights in waiting:
                weights.set_exception(error)  # type: ignore[arg-type]
            return
        # No copies: nothing changes them before every worker has got them, and pushed again.
        for weights in waiting:
            weights.set_result(stepped)

    def push_now(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], int]:
        """Step with one worker's gradients as they come.

        Args:
            number: of the optimizer.
            worker: who pushes.
            settings: of the optimizer's groups.
            gradients: of its parameters here.

        Returns:
            The weights, and the update's staleness.

        Raises:
            RuntimeError: the worker was taken for lost.
        """
        self.calls += 1
        with self._lock:
            return self._stepped(number, worker, settings, gradients)

    def push_all(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], tuple[bool, int]]:
        """Step as `push_now` does, and book the update; nobody is taken for lost in between.

        Returns:
            The weights, and what `WorkDispatcher.made` returns.

        Raises:
            RuntimeError: the worker was taken for lost.
        """
        self.calls += 1
        with self._lock:
            assert self.office is not None, "the one server has the office"
            weights, staleness = self._stepped(number, worker, settings, gradients)
            return weights, self.office.made(worker, staleness)

    def _stepped(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], int]:
        if worker in self._left:
            raise RuntimeError(taken_for_lost(worker))
        staleness = self._updates - self._pulled[worker]
        scale = rate_factor(self._rate, staleness)
        stepped = self.shard.step(number, settings, gradients, scale) if gradients else []
        self._updates += 1
        self._pulled[worker] = self._updates
        # Copies, since the next worker's update overwrites these while they are being sent.
        return [w.clone() for w in stepped], staleness

    def pull(self, worker: int) -> dict[int, Tensor]:
        """Return all weights as they are now, by their keys; none before the first update."""
        self.calls += 1
        with self._lock:
            self._pulled[worker] = self._updates
            # Copies, as in `_stepped`.
            return {key: weights.clone() for key, weights in self.shard.all_weights().items()}

    def states(self) -> dict[int, dict[str, Any]]:
        """Return what the optimizers remember of their parameters, by the parameters' keys."""
        self.calls += 1
        with self._lock:
            return self.shard.all_states()

    def leave(self, worker: int) -> None:
        """Note that a worker has ended, or was lost."""
        with self._lock:
            if self.office is not None:  # inside: an update is made and booked, or not at all
                self.office.gone(worker)
            self._left.add(worker)
            waiting = [
                weights for pushed in self._rounds.values() for _, weights in pushed.values()
            ]
            self._rounds.clear()
        for weights in waiting:
            weights.set_exception(RuntimeError(_ended(self._left)))  # type: ignore[arg-type]
        with self._lock:
            # Last, as the process ends soon after: those who wait have their answers by now.
            if len(self._left) == self._workers:
                self.deserted.set()


def _ended(workers: set[int]) -> str:
    return (
        f"worker(s) {', '.join(map(str, sorted(workers)))} have ended, and a step needs all; let "
        "every rank train the same steps, and close() its Stride when all are done"
    )


_here: list[Server] = []  # the one of this process


def serve(server: Server) -> None:
    """Let workers reach a server in this process."""
    _here[:] = [server]


def begin(number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
    """By RPC: `Server.begin`."""
    _here[0].begin(number, optimizer, keys)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(number: int, worker: int, settings: Settings, gradients: Gradients) -> Weights:
    """By RPC: `Server.push`."""
    return _here[0].push(number, worker, settings, gradients)


def push_now(
    number: int, worker: int, settings: Settings, gradients: Gradients
) -> tuple[list[Tensor], int]:
    """By RPC: `Server.push_now`."""
    return _here[0].push_now(number, worker, settings, gradients)


def push_all(
    number: int, worker: int, settings: Settings, gradients: Gradients
) -> tuple[list[Tensor], tuple[bool, int]]:
    """By RPC: `Server.push_all`, where there is one server."""
    return _here[0].push_all(number, worker, settings, gradients)


def made(worker: int, staleness: int) -> tuple[bool, int]:
    """By RPC: `WorkDispatcher.made`, once all servers have applied the update."""
    return _office().made(worker, staleness)


def pull(worker: int) -> dict[int, Tensor]:
    """By RPC: `Server.pull`."""
    return _here[0].pull(worker)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def take(worker: int, epoch: int, end: int, samples: int, most: int | None) -> Answer:
    """By RPC: `WorkDispatcher.take`."""
    return _office().take(worker, epoch, end, samples, most)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def turn(worker: int) -> Turn:
    """By RPC: `WorkDispatcher.turn`."""
    return _office().turn(worker)


def release(worker: int) -> None:
    """By RPC: `WorkDispatcher.release`."""
    _office().release(worker)


def present() -> tuple[int, ...]:
    """By RPC: `WorkDispatcher.present`."""
    return _office().present()


def report() -> dict[str, Any]:
    """By RPC: `WorkDispatcher.report`."""
    return _office().report()


def _office() -> WorkDispatcher:
    server = _here[0]
    server.called()
    assert server.office is not None, "only the first server is asked, and only in these modes"
    return server.office


def alive() -> None:
    """By RPC: an answer, whatever else there is to do."""
    _here[0].called()


def states() -> dict[int, dict[str, Any]]:
    """By RPC: `Server.states`."""
    return _here[0].states()


def leave(worker: int) -> None:
    """By RPC: `Server.leave`."""
    _here[0].leave(worker)
