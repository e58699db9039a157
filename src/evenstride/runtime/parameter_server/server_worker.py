"""The worker's side of the parameter-server modes.

`ServedWorker` is the common base. A `Synchronous` worker makes each step together with all others;
an `AsyncWorker` does not wait for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import place
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.noise.noise_parts import SentGradient
from evenstride.runtime.parameter_server.server import Server, parameters_of, part_of, settings_of
from evenstride.runtime.parameter_server.server_calls import ServerConnections
from evenstride.runtime.parameter_server.work_dispatcher import WorkDispatcher
from evenstride.runtime.timing.device_timer import RankClock


@dataclass(frozen=True, slots=True)
class ServedOptimizer:
    """An optimizer that the servers step."""

    optimizer: Optimizer
    number: int  # in the order of the first steps, which is the same on every rank
    parameters: dict[int, list[nn.Parameter]]  # by server, in the order of sending
    # Torch's count of changes to the weights when they were last received, by the parameter's id.
    versions: dict[int, int] = field(default_factory=dict)

    def received(self) -> None:
        """Note that the local weights equal those of the servers."""
        for parameter in chain.from_iterable(self.parameters.values()):
            self.versions[id(parameter)] = parameter._version

    @property
    def changed(self) -> bool:
        """Whether the script has changed the weights since."""
        parameters = chain.from_iterable(self.parameters.values())
        return any(self.versions.get(id(p), p._version) != p._version for p in parameters)


class ServedWorker:
    """A worker with its parameters and optimizers on servers.

    ``servers`` is their number. ``connect`` starts them and connects to them; collective.
    """

    def __init__(
        self, rank: int, world_size: int, servers: int, connect: Callable[[], ServerConnections]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._count, self._connect = servers, connect
        self._reached: ServerConnections | None = None
        self._places: dict[int, int] = {}  # server of each parameter, by its id
        self._known: dict[int, ServedOptimizer] = {}  # by the optimizer's id
        self._owner: dict[int, int] = {}  # number of the optimizer that steps each parameter
        # The trained parameters; the index of a parameter is its key, the same on all ranks.
        self._parameters: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []  # watched, but on no server

    @property
    def servers(self) -> ServerConnections:
        """The servers, once a model is watched."""
        if self._reached is None:
            raise UsageError(
                "this synchronisation mode trains only models that were passed to stride.watch(); "
                "call model = stride.watch(model) before the loop"
            )
        return self._reached

    def watch(self, module: nn.Module) -> None:
        """Distribute a module's parameters over the servers; collective.

        Raises:
            ConfigError: there are more servers than parameters in the first module.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._frozen += [p for p in module.parameters() if not p.requires_grad]
        # A further, smaller module may use fewer servers.
        first = self._reached is None
        servers = self._count if first else min(self._count, max(len(parameters), 1))
        places = place([p.numel() * p.element_size() for p in parameters], servers)
        self._places |= {id(p): place for p, place in zip(parameters, places, strict=True)}
        self._parameters += parameters
        if self._reached is None:
            self._reached = self._connect()

    def known(self, optimizer: Optimizer) -> ServedOptimizer:
        """Return an optimizer as the servers know it.

        The first call sends it with the local weights and state, unless another worker was faster.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter that was frozen when stride.watch() got it now requires a gradient. "
                "No server holds it, so each rank would train its own copy. Set requires_grad "
                "before watch(), and use a learning rate of 0 while it must not change"
            )
        if id(optimizer) in self._known:
            return self._checked(self._known[id(optimizer)])
        _require_importable(type(optimizer))
        by_server: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._places:
                by_server.setdefault(self._places[id(parameter)], []).append(parameter)
        known = ServedOptimizer(optimizer, len(self._known), by_server)
        keys = self._keys()
        parts = {
            index: (known.number, part_of(optimizer, mine), [keys[id(p)] for p in mine])
            for index, mine in by_server.items()
        }
        self.servers.call(Server.begin, parts)
        self._known[id(optimizer)] = known
        self._owner |= {id(p): known.number for p in chain.from_iterable(by_server.values())}
        return known

    def _checked(self, known: ServedOptimizer) -> ServedOptimizer:
        """Refuse local changes that do not reach the servers."""
        mine = chain.from_iterable(known.parameters.values())
        if any(self._owner[id(p)] != known.number for p in mine):
            raise UsageError(
                "two optimizers step the same parameters, but each has its own copy of the weights "
                "on the servers; pass each parameter to only one optimizer"
            )
        if known.changed:
            raise UsageError(
                "weights were changed since the optimizer's last step (clamped, swapped, loaded). "
                "In this synchronisation mode the servers hold the weights and do not get such "
                "changes; change weights only by the optimizer, restore before the first step, or "
                "use bsp"
            )
        return known

    def pull(self) -> None:
        """Get all current weights, also those of optimizers that have not stepped here yet."""
        with torch.no_grad():
            for weights in self.servers.call(Server.pull, self._everywhere(self._rank)).values():
                for key, value in weights.items():
                    self._parameters[key].copy_(value)
        for known in self._known.values():
            known.received()

    def bring_home(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Copy the optimizers' states from the servers to the local optimizers, for a checkpoint.

        ``optimizers`` may name some that have not stepped here: a worker may not have trained yet.
        """
        states, keys = dict[int, dict[str, Any]](), self._keys()
        for part in self.servers.call(Server.states, self._everywhere()).values():
            states |= part
        known = {id(each.optimizer): each.optimizer for each in self._known.values()}
        for optimizer in (known | {id(each): each for each in optimizers}).values():
            for parameter in parameters_of(optimizer):
                state = states.get(keys.get(id(parameter), -1))
                if state is not None and self._owns(optimizer, parameter):
                    optimizer.state[parameter] = {
                        name: _put(value, parameter) for name, value in state.items()
                    }

    def _owns(self, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        known = self._known.get(id(optimizer))
        return known is None or self._owner[id(parameter)] == known.number

    def _pushes(self, known: ServedOptimizer) -> dict[int, tuple[Any, ...]]:
        """Return the arguments of `Server.push` and similar calls, by server."""
        settings = settings_of(known.optimizer)
        return {
            index: (known.number, self._rank, settings, [_sent(p) for p in mine])
            for index, mine in known.parameters.items()
        }

    def _keys(self) -> dict[int, int]:
        return {id(parameter): key for key, parameter in enumerate(self._parameters)}

    def _everywhere(self, *arguments: Any) -> dict[int, tuple[Any, ...]]:
        return dict.fromkeys(range(len(self.servers)), arguments)

    def after_step(self, optimizer: Optimizer) -> None:
        """Do nothing: the weights have already arrived."""

    def close(self, *, in_order: bool) -> None:
        if self._reached is not None:
            self._reached.close(in_order=in_order)


def _put(value: Any, parameter: nn.Parameter) -> Any:
    """Move a value of an optimizer's state to the expected device; counters stay on the CPU."""
    if isinstance(value, Tensor) and value.dim():
        return value.to(parameter.device)
    return value


def _sent(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.detach().cpu()


def _receive(known: ServedOptimizer, weights: Mapping[int, list[Tensor]]) -> None:
    with torch.no_grad():
        for index, mine in known.parameters.items():
            for parameter, value in zip(mine, weights[index], strict=True):
                parameter.copy_(value)
                parameter.grad = None  # so that the local optimizer does nothing
    known.received()


def _require_importable(kind: type[Optimizer]) -> None:
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"the optimizer {kind.__name__} is defined in the script itself, so the processes of "
            "the parameter servers cannot import it; move the class into a module next to the "
            "script"
        )


class Synchronous(ServedWorker):
    """Sends each step's gradients to the servers, waits for all workers, and gets weights back.

    As in the parameter-server papers, the servers average the gradients, make the update and
    distribute the weights. The result is that of an all-reduce, up to rounding.

    ``sent`` gets the norms of the gradients of the steps whose noise is measured, if there are any.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        servers: int,
        connect: Callable[[], ServerConnections],
        sent: SentGradient | None = None,
    ) -> None:
        super().__init__(rank, world_size, servers, connect)
        self._sent = sent

    def factor(self, draw: Draw) -> float:
        """Return the loss factor that turns the mean over workers into the mean over samples."""
        return loss_factor(self._world_size, draw.samples, draw.window)

    def before_step(self, optimizer: Optimizer) -> None:
        """Send this worker's gradients, and load the weights after the update of all workers."""
        known, sent = self.known(optimizer), self._sent
        mine = chain.from_iterable(known.parameters.values())
        measures = sent is not None and sent.send([p.grad for p in mine if p.grad is not None])
        pushes = {i: (*arguments, measures) for i, arguments in self._pushes(known).items()}
        answers = self.servers.call(Server.push, pushes)
        if sent is not None and measures:
            sent.averaged(sum(squared or 0.0 for _, squared in answers.values()))
        _receive(known, {index: weights for index, (weights, _) in answers.items()})


class StandingPosition(Protocol):
    """The part of this rank's `CommittedPosition` that an `AsyncWorker` uses."""

    earlier: int
    position: int

    def meet(self, position: int, updates: int) -> None:
        """Set the position to the common one at the end of an epoch."""


class AsyncWorker(ServedWorker):
    """Sends its gradients at once, and continues with the weights that are current then.

    An update has the weight ``W * b_k / B``, in proportion to its batch, so that the sum of ``W``
    updates does not depend on the split. With equal shares it is the asynchronous training of the
    papers, in which each update is a whole step.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        global_batch: int,
        servers: int,
        connect: Callable[[], ServerConnections],
        clock: RankClock,
        progress: StandingPosition,
    ) -> None:
        super().__init__(rank, world_size, servers, connect)
        self._global_batch, self._clock, self._progress = global_batch, clock, progress
        self._step, self._counted = -1, -1
        self.position = 0  # samples of the epoch that all workers have trained
        self.waits = False  # whether this worker waits for others
        # Samples that each worker trained in the last finished epoch; empty before that.
        self.split: tuple[int, ...] = ()
        self._report: dict[str, Any] = {}
        self._before: int | None = None  # updates before the run was restored

    def factor(self, draw: Draw) -> float:
        """Return a batch's weight in its update times the weight of the update."""
        self._step = draw.step
        part = draw.samples / draw.share if draw.share else 0.0
        return part * self._world_size * draw.claimed / self._global_batch

    def before_step(self, optimizer: Optimizer) -> None:
        """Send this worker's gradients to the servers, and get the current weights."""
        known = self.known(optimizer)
        if len(self._known) > 1 or self._step == self._counted:
            raise UsageError(
                f"{type(optimizer).__name__}.step() is the second step for a batch, or that of a "
                "second optimizer. In this synchronisation mode an update is one step of one "
                "optimizer: other workers use its weights at once, and it may end the epoch. Use "
                "one optimizer with several parameter groups and one step() per batch, or "
                'sync="bsp-ps"'
            )
        may = self._push(known)
        self._counted = self._step
        self._clock.timer.gradients_ready()  # until here it was busy time
        if not may:
            # Other workers continued during the wait, so the weights of the push are stale.
            self._wait(WorkDispatcher.turn, self._rank)
            self.pull()

    def _push(self, known: ServedOptimizer) -> bool:
        """Send gradients, get weights, and return whether this worker may continue at once.

        The update is recorded only after all servers have applied it: it may end the epoch, and
        then all workers must have the same weights. A single server does both at once. With
        several, some may have applied it when this worker is declared lost; then another worker
        trains its samples again.
        """
        pushes = self._pushes(known)
        if 0 not in pushes:  # the first server counts every update
            pushes[0] = (known.number, self._rank, settings_of(known.optimizer), [])
        if len(self.servers) == 1:
            weights, (may, self.position) = self.servers.call(Server.push_all, pushes)[0]
            _receive(known, {0: weights})
            return bool(may)
        answers = self.servers.call(Server.push_now, pushes)
        _receive(known, {index: weights for index, (weights, _) in answers.items()})
        may, self.position = self.servers.call(
            WorkDispatcher.made, {0: (self._rank, answers[0][1])}
        )[0]
        return bool(may)

    def take(
        self, epoch: int, end: int, samples: int, most_steps: int | None
    ) -> list[tuple[int, int]] | None:
        """Wait for the next samples to train, and return them as ranges of positions.

        The list is empty if all samples are assigned and this worker still has untrained ones. The
        result is ``None`` if the epoch of ``end`` samples is over: then all workers have the same
        weights. ``samples`` is the requested number. ``most_steps`` limits the run to this many
        global batches over all workers, because workers make different numbers of steps.
        """
        if self._before is None:
            # Once, at the first batch: after restoring a checkpoint, and before `_meet` changes it.
            self._before = self._progress.earlier
        with self._clock.waiting():
            stretches: list[tuple[int, int]] | None
            most = None if most_steps is None else most_steps * self._global_batch
            stretches = self._wait(WorkDispatcher.take, self._rank, epoch, end, samples, most)
            if stretches is None:
                self._meet()
        return stretches

    def _meet(self) -> None:
        """Get the common state at the end of an epoch: weights, position and number of updates.

        A limit of steps may have ended the epoch before its last or its first sample. Before its
        first, the position does not change.
        """
        self.pull()
        progress, report = self._progress, self.servers.call(WorkDispatcher.report, {0: ()})[0]
        self.position = report["position"] or progress.position
        progress.meet(self.position, (self._before or 0) + report["count"])
        self.split = tuple(report["trained"])

    def release(self) -> None:
        """Return assigned, untrained samples."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):  # a lost server may be why the loop was left
                self.servers.call(WorkDispatcher.release, {0: (self._rank,)})

    def lost(self, rank: int) -> bool:
        """Inform the servers that another worker is lost; may be called from any thread.

        Return whether the others can continue without it: not before all have connected.
        """
        if self._reached is None:
            return False
        with contextlib.suppress(Exception):  # a failed server makes the next call fail
            self.servers.call(Server.leave, self._everywhere(rank))
        return True

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; between two epochs all callers get the same.

        Raises:
            WorkerLost: the first server is lost.
        """
        if self._reached is None:
            return tuple(range(self._world_size))
        workers: tuple[int, ...] = self.servers.call(WorkDispatcher.present, {0: ()})[0]
        return workers

    def report(self) -> dict[str, Any]:
        """Return the first server's counts: staleness, and samples assigned again."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):
                self._report = self.servers.call(WorkDispatcher.report, {0: ()})[0]
        return self._report

    def close(self, *, in_order: bool) -> None:
        if in_order:
            self.report()
        super().close(in_order=in_order)

    def _wait(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.waiting():
            return self.servers.call(function, {0: arguments})[0]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this worker waits, so that the heartbeats of the others are watched."""
        before, self.waits = self.waits, True
        try:
            yield
        finally:
            self.waits = before
