"""What all modes over parameter servers have in common on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.sync_modes.parameter_placement import place
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.parameter_server import server
from evenstride.runtime.parameter_server.parameter_shard import parameters_of, part_of
from evenstride.runtime.parameter_server.server_calls import ServerConnections


@dataclass(frozen=True, slots=True)
class ServedOptimizer:
    """An optimizer that the servers step.

    Args:
        optimizer: it.
        number: of it; the first to step is the first on every rank.
        parameters: of it, by server, in the order in which they are sent.
        versions: torch's counts of changes to their weights, when the servers' came.
    """

    optimizer: Optimizer
    number: int
    parameters: dict[int, list[nn.Parameter]]
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

    Args:
        servers: number of servers.
        connect: starts and reaches them; collective.
    """

    def __init__(self, servers: int, connect: Callable[[], ServerConnections]) -> None:
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
        """The servers, once a model is watched.

        Raises:
            UsageError: none is.
        """
        if self._reached is None:
            raise UsageError(
                "this mode of synchronisation trains models that stride.watch() was given; call "
                "model = stride.watch(model) before the loop"
            )
        return self._reached

    def watch(self, module: nn.Module) -> None:
        """Deal a module's parameters out to the servers; collective.

        Raises:
            ConfigError: there are more servers than parameters of the first module.
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

        Raises:
            UsageError: the servers cannot know of what was done to the parameters.
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
        self.servers.call(server.begin, parts)
        self._known[id(optimizer)] = known
        self._owner |= {id(p): known.number for p in chain.from_iterable(by_server.values())}
        return known

    def _checked(self, known: ServedOptimizer) -> ServedOptimizer:
        """Refuse what the servers cannot know of.

        Raises:
            UsageError: weights were changed by something else, or by another optimizer.
        """
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

    def pull(self, rank: int) -> None:
        """Get all weights as they are now, also of optimizers that have not stepped here yet."""
        with torch.no_grad():
            for weights in self.servers.call(server.pull, self._everywhere(rank)).values():
                for key, value in weights.items():
                    self._parameters[key].copy_(value)
        for known in self._known.values():
            known.received()

    def bring_home(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Give the optimizers here the state that the servers keep for them, to be saved.

        Args:
            optimizers: that are to have it besides those that have stepped here: a worker may
                have had nothing to train so far.
        """
        states, keys = dict[int, dict[str, Any]](), self._keys()
        for part in self.servers.call(server.states, self._everywhere()).values():
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
        """Return whether an optimizer steps a parameter, as far as this worker knows."""
        known = self._known.get(id(optimizer))
        return known is None or self._owner[id(parameter)] == known.number

    def _keys(self) -> dict[int, int]:
        return {id(parameter): key for key, parameter in enumerate(self._parameters)}

    def _everywhere(self, *arguments: Any) -> dict[int, tuple[Any, ...]]:
        return dict.fromkeys(range(len(self.servers)), arguments)

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing: the weights have come already."""

    def close(self, *, in_order: bool) -> None:
        """Part from the servers. May be called again."""
        if self._reached is not None:
            self._reached.close(in_order=in_order)


def _put(value: Any, parameter: nn.Parameter) -> Any:
    """Return a value of an optimizer's state where torch has it: counts stay on the CPU."""
    if isinstance(value, Tensor) and value.dim():
        return value.to(parameter.device)
    return value


def sent(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient as it is sent."""
    return None if parameter.grad is None else parameter.grad.detach().cpu()


def receive(known: ServedOptimizer, weights: Mapping[int, list[Tensor]]) -> None:
    """Put the servers' weights in place.

    Args:
        known: the optimizer whose parameters they are.
        weights: by server.
    """
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
