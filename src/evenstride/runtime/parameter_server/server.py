"""A parameter server: its part of the parameters, their optimizers, and the calls of workers."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from evenstride.core.sync_modes.mode_specs import rate_factor
from evenstride.runtime.noise.noise_parts import square
from evenstride.runtime.parameter_server.work_dispatcher import (
    WorkDispatcher,
    declared_lost,
)

Settings = list[dict[str, Any]]
"""The settings of an optimizer's groups, such as the learning rate, without the parameters."""

Gradients = Sequence[Tensor | None]
Stepped = torch.futures.Future[tuple[list[Tensor], float | None]]
"""Weights after a step, and the squared norm of its mean gradient if a worker asked for it."""


class _Pushed(NamedTuple):
    """What a worker has sent for a step, and its answer."""

    gradients: Gradients
    measures: bool  # whether it needs the norm of the mean
    answer: Stepped


def part_of(optimizer: Optimizer, mine: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer of CPU copies of some parameters, with their state.

    It is sent to a server, which must be able to import its class. Groups without any of the
    parameters are kept empty, so that settings match by position.
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
    """Return an optimizer's parameters, in the order of sent gradients and weights."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the current settings of an optimizer's groups, which a scheduler may have changed."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class Shard:
    """Some of the parameters, with the optimizers that the first worker sent for them."""

    def __init__(self) -> None:
        self._optimizers: dict[int, Optimizer] = {}
        self._keys: dict[int, Sequence[int]] = {}
        self.version = 0  # updates so far

    def begin(self, number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
        """Add an optimizer with its parameters, unless one with this number exists.

        ``keys`` identify its parameters for workers without an optimizer.
        """
        if number not in self._optimizers:
            self._optimizers[number], self._keys[number] = optimizer, keys

    def step(
        self, number: int, settings: Settings, gradients: Sequence[Tensor | None], scale: float = 1
    ) -> list[Tensor]:
        """Step one optimizer and return its parameters' weights, which later steps overwrite.

        A gradient is ``None`` for a parameter without effect on the loss. ``scale`` multiplies the
        learning rates in this step only. It does not scale the gradients, because the step of many
        optimizers does not depend on the gradients' scale.
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
        """Return all weights by key, from the latest optimizer; they share memory with it."""
        return {
            key: weights
            for number, keys in self._keys.items()
            for key, weights in zip(keys, self.weights(number), strict=True)
        }

    def all_states(self) -> dict[int, dict[str, Any]]:
        """Return the optimizers' states of the parameters by key; see `all_weights`."""
        return {
            key: dict(optimizer.state.get(parameter, {}))
            for number, optimizer in self._optimizers.items()
            for key, parameter in zip(self._keys[number], parameters_of(optimizer), strict=True)
        }


def mean_of(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the mean of the workers' gradients, summed in the given order.

    Each is already scaled by ``W * n_k / N``, so this is the mean over all samples. ``None`` counts
    as zero if another worker has a gradient.
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
    """One server: its part of the parameters, and the workers that are left.

    In asynchronous modes the first server has the ``dispatcher``. ``rate`` defines how the step
    size of an update depends on its staleness; see `rate_factor`.
    """

    def __init__(
        self, workers: int, dispatcher: WorkDispatcher | None = None, rate: str = "constant"
    ) -> None:
        self.shard, self.dispatcher, self._rate = Shard(), dispatcher, rate
        self._workers, self._lock = workers, threading.Lock()
        self._updates, self._pulled = 0, [0] * workers
        self.calls = 0  # so far; shows whether any worker still needs this server
        self._rounds: dict[int, dict[int, _Pushed]] = {}
        self._left: set[int] = set()
        self.deserted = threading.Event()  # set when all workers have left

    def begin(self, number: int, optimizer: Optimizer, keys: Sequence[int]) -> None:
        with self._lock:
            self.shard.begin(number, optimizer, keys)

    def answer(
        self, method: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> torch.futures.Future[Any]:
        """Call a method of this server or of its dispatcher, for a worker.

        A result that depends on other workers is a future, and is sent when it is complete.
        """
        self.calls += 1
        owner = self if getattr(Server, method.__name__, None) is method else self.dispatcher
        result = method(owner, *arguments)
        if isinstance(result, torch.futures.Future):
            return result
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return future

    def alive(self) -> None:
        """Return at once, also while other calls wait."""

    def push(
        self,
        number: int,
        worker: int,
        settings: Settings,
        gradients: Gradients,
        measures: bool = False,
    ) -> Stepped:
        """Return the weights after a step with all workers' mean gradient, once all have pushed.

        ``measures`` asks for the squared norm of this server's part of the mean gradient.

        Raises:
            RuntimeError: a worker has ended, so the step cannot complete.
        """
        answer: Stepped = torch.futures.Future()
        with self._lock:  # `leave` ends the wait of all workers that have pushed before
            if self._left:
                raise RuntimeError(_ended(self._left))
            pushed = self._rounds.setdefault(number, {})
            pushed[worker] = _Pushed(gradients, measures, answer)
            complete = len(pushed) == self._workers
            if complete:
                del self._rounds[number]
        if complete:
            self._step(number, settings, pushed)
        return answer

    def _step(self, number: int, settings: Settings, pushed: dict[int, _Pushed]) -> None:
        try:
            mean = mean_of([pushed[worker].gradients for worker in sorted(pushed)])
            given = [gradient for gradient in mean if gradient is not None]
            measures = any(one.measures for one in pushed.values())
            squared = float(square(given)) if measures and given else None
            stepped = self.shard.step(number, settings, mean), squared
        except Exception as error:
            # All workers wait for this step, so each must get its error.
            for one in pushed.values():
                one.answer.set_exception(error)  # type: ignore[arg-type]
            return
        # No copies: they do not change until every worker has received them and pushed again.
        for one in pushed.values():
            one.answer.set_result(stepped)

    def push_now(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], int]:
        """Step with one worker's gradients at once; return the weights and the staleness.

        Raises:
            RuntimeError: the worker was declared lost.
        """
        with self._lock:
            return self._stepped(number, worker, settings, gradients)

    def push_all(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], tuple[bool, int]]:
        """Step like `push_now` and record the update, atomically.

        Return the weights, and the result of `WorkDispatcher.made`.

        Raises:
            RuntimeError: the worker was declared lost.
        """
        with self._lock:
            assert self.dispatcher is not None, "a single server has the dispatcher"
            weights, staleness = self._stepped(number, worker, settings, gradients)
            return weights, self.dispatcher.made(worker, staleness)

    def _stepped(
        self, number: int, worker: int, settings: Settings, gradients: Gradients
    ) -> tuple[list[Tensor], int]:
        if worker in self._left:
            raise RuntimeError(declared_lost(worker))
        staleness = self._updates - self._pulled[worker]
        scale = rate_factor(self._rate, staleness)
        stepped = self.shard.step(number, settings, gradients, scale) if gradients else []
        self._updates += 1
        self._pulled[worker] = self._updates
        # Copies, because the next worker's update overwrites these while they are being sent.
        return [w.clone() for w in stepped], staleness

    def pull(self, worker: int) -> dict[int, Tensor]:
        """Return all current weights by key; empty before the first update."""
        with self._lock:
            self._pulled[worker] = self._updates
            # Copies, as in `_stepped`.
            return {key: weights.clone() for key, weights in self.shard.all_weights().items()}

    def states(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            return self.shard.all_states()

    def leave(self, worker: int) -> None:
        """Note that a worker has ended or was lost."""
        with self._lock:
            if self.dispatcher is not None:  # under the lock, so that updates stay atomic
                self.dispatcher.gone(worker)
            self._left.add(worker)
            waiting = [one.answer for pushed in self._rounds.values() for one in pushed.values()]
            self._rounds.clear()
        for answer in waiting:
            answer.set_exception(RuntimeError(_ended(self._left)))  # type: ignore[arg-type]
        with self._lock:
            # Last, because the process ends soon after: waiting workers have their answers by now.
            if len(self._left) == self._workers:
                self.deserted.set()


def _ended(workers: set[int]) -> str:
    return (
        f"worker(s) {', '.join(map(str, sorted(workers)))} have ended, but a step needs all "
        "workers; train the same steps on every rank, and close() the Stride after them"
    )


here: list[Server] = []  # the server of this process


def serve(server: Server) -> None:
    here[:] = [server]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def ask(method: Callable[..., Any], *arguments: Any) -> torch.futures.Future[Any]:
    """Call a method of this process' `Server` or of its `WorkDispatcher`; called by RPC."""
    return here[0].answer(method, arguments)
