"""One worker's side of the modes over parameter servers.

`ServedWorker` is what they have in common, `Synchronous` trains in step with all others, and
`AsyncWorker` on its own.
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
from evenstride.runtime.parameter_server.server import Server, parameters_of, part_of, settings_of
from evenstride.runtime.parameter_server.server_calls import ServerConnections
from evenstride.runtime.parameter_server.work_dispatcher import WorkDispatcher
from evenstride.runtime.timing.device_timer import RankClock


@dataclass(frozen=True, slots=True)
class ServedOptimizer:
    """An optimizer that the servers step."""

    optimizer: Optimizer
    number: int  # the first to step is the first on every rank
    parameters: dict[int, list[nn.Parameter]]  # by server, in the order in which they are sent
    # By id of the parameter: torch's count of changes to its weights, when the servers' came.
    versions: dict[int, int] = field(default_factory=dict)

    def received(self) -> None:
        """Note that the weights here are those of the servers."""
        for parameter in chain.from_iterable(self.parameters.values()):
            self.versions[id(parameter)] = parameter._version

    @property
    def changed(self) -> bool:
        """Whether something else has changed the weights since."""
        parameters = chain.from_iterable(self.parameters.values())
        return any(self.versions.get(id(p), p._version) != p._version for p in parameters)


class ServedWorker:
    """A worker whose parameters and optimizers are on servers.

    ``servers`` is their number, and ``connect`` starts and reaches them; collective.
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
        # What is trained; a parameter's place here is its key, the same on all ranks.
        self._parameters: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []  # of what is watched, with no place

    @property
    def servers(self) -> ServerConnections:
        """The servers, once a model is watched."""
        if self._reached is None:
            raise UsageError(
                "this mode of synchronisation trains models that stride.watch() was given; call "
                "model = stride.watch(model) before the loop"
            )
        return self._reached

    def watch(self, module: nn.Module) -> None:
        """Deal a module's parameters out to the servers; collective.

        `ConfigError` if there are more servers than parameters of the first module.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._frozen += [p for p in module.parameters() if not p.requires_grad]
        # A further, smaller module need not be on all of them.
        first = self._reached is None
        servers = self._count if first else min(self._count, max(len(parameters), 1))
        places = place([p.numel() * p.element_size() for p in parameters], servers)
        self._places |= {id(p): place for p, place in zip(parameters, places, strict=True)}
        self._parameters += parameters
        if self._reached is None:
            self._reached = self._connect()

    def known(self, optimizer: Optimizer) -> ServedOptimizer:
        """Return an optimizer as the servers know it.

        At first they take it over with weights and state as they are here, unless another worker
        was first.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter of a watched model was frozen when stride.watch() got it, and needs a "
                "gradient now; no server holds it, so each rank would train its own; let it "
                "require a gradient before watch(), with a learning rate of 0 for as long as it "
                "is to stay"
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
        """Refuse what the servers cannot know of."""
        mine = chain.from_iterable(known.parameters.values())
        if any(self._owner[id(p)] != known.number for p in mine):
            raise UsageError(
                "two optimizers step the same parameters in turns, and each of them is on the "
                "servers with weights of its own; give each parameter to one optimizer"
            )
        if known.changed:
            raise UsageError(
                "weights were changed since the optimizer's last step (clamped, swapped, loaded), "
                "and the servers, which hold them, do not know; leave the weights to the optimizer "
                "in this mode of synchronisation, restore before the first step, or use bsp"
            )
        return known

    def pull(self) -> None:
        """Get all weights as they are now, also of optimizers that have not stepped here yet."""
        with torch.no_grad():
            for weights in self.servers.call(Server.pull, self._everywhere(self._rank)).values():
                for key, value in weights.items():
                    self._parameters[key].copy_(value)
        for known in self._known.values():
            known.received()

    def bring_home(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Give the optimizers here the state that the servers keep for them, to be saved.

        A worker may have had nothing to train so far, so optimizers can be named that have not
        stepped here.
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
        """Return by server what `Server.push` and its like are called with."""
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
        """Nothing: the weights have come already."""

    def close(self, *, in_order: bool) -> None:
        if self._reached is not None:
            self._reached.close(in_order=in_order)


def _put(value: Any, parameter: nn.Parameter) -> Any:
    """Return a value of an optimizer's state where torch has it: counts stay on the CPU."""
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
                parameter.grad = None  # so that the optimizer here does nothing
    known.received()


def _require_importable(kind: type[Optimizer]) -> None:
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"the optimizer {kind.__name__} is defined in the script itself, and parameter servers "
            "are processes of their own, which cannot import that; put the class into a module "
            "beside the script"
        )


class Synchronous(ServedWorker):
    """Sends every step's gradients to the servers, waits for all others', and gets weights back.

    The mean of gradients, the update and the distribution of weights are where the parameter-server
    papers have them; the result is that of an all-reduce up to rounding.
    """

    def factor(self, draw: Draw) -> float:
        """Return what makes the mean over workers the mean over samples."""
        return loss_factor(self._world_size, draw.samples, draw.window)

    def before_step(self, optimizer: Optimizer) -> None:
        """Replace this worker's gradients by the weights that all workers' lead to."""
        known = self.known(optimizer)
        _receive(known, self.servers.call(Server.push, self._pushes(known)))


class StandingPosition(Protocol):
    """What an `AsyncWorker` needs of this rank's `CommittedPosition`."""

    earlier: int
    position: int

    def meet(self, position: int, updates: int) -> None:
        """Stand where all do at the end of an epoch."""


class AsyncWorker(ServedWorker):
    """Sends its gradients whenever it has some, and goes on with the weights there are then.

    An update weighs ``W * b_k / B``: as much more as its batch is larger than an equal share, so
    that the sum of a round's updates does not depend on the split. With equal shares it is the
    asynchronous training of the papers, in which each update is a whole step.
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
        self.position = 0  # samples of the epoch that are trained, by all workers
        self.waits = False  # whether this worker waits for others
        # Samples that each worker trained in the latest epoch that ended; empty without any.
        self.split: tuple[int, ...] = ()
        self._report: dict[str, Any] = {}
        self._before: int | None = None  # updates of the runs that this one goes on from

    def factor(self, draw: Draw) -> float:
        """Return the weight of a batch's part in its update, and of the update among all."""
        self._step = draw.step
        part = draw.samples / draw.share if draw.share else 0.0
        return part * self._world_size * draw.claimed / self._global_batch

    def before_step(self, optimizer: Optimizer) -> None:
        """Let the servers apply this worker's gradients, and get the weights there are then."""
        known = self.known(optimizer)
        if len(self._known) > 1 or self._step == self._counted:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called after an update was made, which is "
                "one step of one optimizer in this mode of synchronisation: other workers go on "
                "with the weights at once, and the epoch may end with it; use one optimizer with "
                'several parameter groups, one step() for each batch, or sync="bsp-ps"'
            )
        may = self._push(known)
        self._counted = self._step
        self._clock.timer.gradients_ready()  # so far it was this worker's own time
        if not may:
            # The others went on during the wait, so the weights that came with the push are stale.
            self._wait(WorkDispatcher.turn, self._rank)
            self.pull()

    def _push(self, known: ServedOptimizer) -> bool:
        """Send gradients, get weights, and return whether this worker may go on at once.

        The update is booked when all servers have applied it, not before: the epoch may end with
        it, and all workers are to have the same weights then. One server can do both at once. Of
        several, some may have applied it when this worker is taken for lost: then its samples are
        trained once more by another.
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
        """Return the stretches of positions that this worker trains next, waiting if need be.

        There are none until this worker has trained what it has, if all is given out, and ``None``
        if the epoch, of ``end`` samples, is over: then all workers have the same weights.
        ``samples`` are what it would have. ``most_steps`` limits the run to so many global batches
        of samples over all workers, since no two have the same number of steps.
        """
        if self._before is None:
            # Once, at the first batch: a checkpoint has been restored by then, and `_meet` moves
            # it.
            self._before = self._progress.earlier
        with self._clock.waiting():
            stretches: list[tuple[int, int]] | None
            most = None if most_steps is None else most_steps * self._global_batch
            stretches = self._wait(WorkDispatcher.take, self._rank, epoch, end, samples, most)
            if stretches is None:
                self._meet()
        return stretches

    def _meet(self) -> None:
        """Stand where all others do at the end of an epoch: weights, samples, updates made.

        A limit of steps may have ended it before its last sample, or before its first; then it is
        no further than it was.
        """
        self.pull()
        progress, told = self._progress, self.servers.call(WorkDispatcher.report, {0: ()})[0]
        self.position = told["position"] or progress.position
        progress.meet(self.position, (self._before or 0) + told["count"])
        self.split = tuple(told["trained"])

    def release(self) -> None:
        """Give back what was taken and not trained."""
        if self._reached is not None and not self._reached.closed:
            with contextlib.suppress(Exception):  # the loop may have been left because of it
                self.servers.call(WorkDispatcher.release, {0: (self._rank,)})

    def lost(self, rank: int) -> bool:
        """Tell the servers that another worker is gone, from any thread.

        Return whether the others can go on without it: not before all have met.
        """
        if self._reached is None:
            return False
        with contextlib.suppress(Exception):  # of whom nothing is expected any more
            self.servers.call(Server.leave, self._everywhere(rank))
        return True

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; the same on all that ask between two epochs.

        Raises:
            WorkerLost: the first server is gone.
        """
        if self._reached is None:
            return tuple(range(self._world_size))
        told: tuple[int, ...] = self.servers.call(WorkDispatcher.present, {0: ()})[0]
        return told

    def report(self) -> dict[str, Any]:
        """Return what the first server has counted: staleness, and samples handed out again."""
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
