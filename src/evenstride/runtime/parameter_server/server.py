"""A parameter server: its part of the parameters, their optimizers, and what workers may ask."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from evenstride.core.sync_modes.mode_specs import rate_factor
from evenstride.runtime.parameter_server.work_dispatcher import (
    WorkDispatcher,
    taken_for_lost,
)

Settings = list[dict[str, Any]]
"""Of an optimizer's groups, such as the learning rate; without their parameters."""

Gradients = Sequence[Tensor | None]
Weights = torch.futures.Future[list[Tensor]]


def part_of(optimizer: Optimizer, mine: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer of copies, on the CPU, of a few parameters, with their state.

    It is meant to be sent: its class must be one that the server can import, too. Groups that have
    none of the parameters stay, without any, so that settings go by position.
    """
    copies = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in mine}
    part = copy.copy(optimizer)
    part.param_groups = [
        {**group, "params": [copies[id(p)] for p in group["params"] if id(p) in copies]}
        for group in optimizer.param_groups
    ]
    part.state = defaultdict(dict)
    for parameter in mine:
        if parameter in optimizer.state:
            part.state[copies[id(parameter)]] = _at_home(optimizer.state[parameter])
    return part


def _at_home(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order in which gradients and weights are sent."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of an optimizer's groups, as a scheduler may have changed them."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class Shard:
    """Some of the parameters, stepped by optimizers that were sent by whoever came first."""

    def __init__(self) -> None:
        self._optimizers: dict[int, Optimizer] = {}
        self._keys: dict[int, Sequence[int]] = {}
        self.version = 0  # updates so far

    def begin(self, number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
        """Take over an optimizer with its parameters, unless there is one of that number.

        Workers that have no optimizer yet know its parameters by ``keys``.
        """
        if number not in self._optimizers:
            self._optimizers[number], self._keys[number] = optimizer, keys

    def step(
        self, number: int, settings: Settings, gradients: Sequence[Tensor | None], scale: float = 1
    ) -> list[Tensor]:
        """Step one optimizer and return its parameters' weights, which later steps overwrite.

        A gradient is ``None`` for a parameter that had no part in the loss. ``scale`` multiplies
        the learning rates in this step only. Gradients stay as they are: many optimizers make the
        same step of a smaller one.
        """
        optimizer = self._optimizers[number]
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
            if scale != 1 and "lr" in values:
                group["lr"] = values["lr"] * scale
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        self.version += 1
        return self.weights(number)

    def weights(self, number: int) -> list[Tensor]:
        """Return the weights of an optimizer's parameters; they share memory with them."""
        return [p.detach() for p in parameters_of(self._optimizers[number])]

    def all_weights(self) -> dict[int, Tensor]:
        """Return all weights by their keys, those of the latest optimizer; they share memory."""
        return {
            key: weights
            for number, keys in self._keys.items()
            for key, weights in zip(keys, self.weights(number), strict=True)
        }

    def all_states(self) -> dict[int, dict[str, Any]]:
        """Return what optimizers remember of the parameters by their keys; see `all_weights`."""
        return {
            key: dict(optimizer.state.get(parameter, {}))
            for number, optimizer in self._optimizers.items()
            for key, parameter in zip(self._keys[number], parameters_of(optimizer), strict=True)
        }


def mean_of(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the mean of the workers' gradients, added up in the order in which they are given.

    Each is scaled by ``W * n_k / N`` already, so this is the mean over all samples. ``None`` counts
    as zero where another worker has a gradient.
    """
    return [
        _mean([g for g in each if g is not None], len(parts)) for each in zip(*parts, strict=True)
    ]


def _mean(gradients: list[Tensor], workers: int) -> Tensor | None:
    if not gradients:
        return None
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return torch.div(total, workers, out=total)


class Server:
    """One server: its part of the parameters, and who of the workers is there.

    The first server has the ``office``, where workers do not keep step. ``rate`` says how the step
    size of an update depends on its staleness; see `rate_factor`.
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
        with self._lock:
            self.shard.begin(number, optimizer, keys)

    def answer(
        self, method: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> torch.futures.Future[Any]:
        """Call a method of this or of the office, for a worker.

        What depends on other workers is a future already, and is sent once it is there.
        """
        self.calls += 1
        owner = self if getattr(Server, method.__name__, None) is method else self.office
        told = method(owner, *arguments)
        if isinstance(told, torch.futures.Future):
            return told
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(told)
        return future

    def alive(self) -> None:
        """Answer, whatever else there is to do."""

    def push(self, number: int, worker: int, settings: Settings, gradients: Gradients) -> Weights:
        """Return the weights after a step with all workers' mean gradient, once all have pushed.

        Raises:
            RuntimeError: a worker has ended, for which the others would wait.
        """
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
        """Step with one worker's gradients as they come; return the weights and the staleness.

        Raises:
            RuntimeError: the worker was taken for lost.
        """
        with self._lock:
            return self._stepped(number, worker, settings, gradients)

    def push_all(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], tuple[bool, int]]:
        """Step as `push_now` does, and book the update; nobody is taken for lost in between.

        Return the weights, and what `WorkDispatcher.made` returns.

        Raises:
            RuntimeError: the worker was taken for lost.
        """
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
        with self._lock:
            self._pulled[worker] = self._updates
            # Copies, as in `_stepped`.
            return {key: weights.clone() for key, weights in self.shard.all_weights().items()}

    def states(self) -> dict[int, dict[str, Any]]:
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


here: list[Server] = []  # the one of this process


def serve(server: Server) -> None:
    here[:] = [server]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def ask(method: Callable[..., Any], *arguments: Any) -> torch.futures.Future[Any]:
    """By RPC: call a method of the `Server` of this process, or of its `WorkDispatcher`."""
    return here[0].answer(method, arguments)
