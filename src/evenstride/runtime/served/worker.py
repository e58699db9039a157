"""What all modes over parameter servers have in common on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.placing import place
from evenstride.errors import UsageError
from evenstride.runtime.served import server
from evenstride.runtime.served.calls import Servers
from evenstride.runtime.served.shard import parameters_of, part_of


@dataclass(frozen=True, slots=True)
class Known:
    """An optimizer that the servers step.

    Args:
        number: of it; the first to step is the first on every rank.
        parameters: of it, by server, in the order in which they are sent.
    """

    number: int
    parameters: dict[int, list[nn.Parameter]]


class Served:
    """A worker whose parameters and optimizers are on servers.

    Args:
        servers: number of servers.
        connect: starts and reaches them; collective.
    """

    def __init__(self, servers: int, connect: Callable[[], Servers]) -> None:
        self._count, self._connect = servers, connect
        self._reached: Servers | None = None
        self._places: dict[int, int] = {}  # server of each parameter, by its id
        self._known: dict[int, Known] = {}  # by the optimizer's id
        self._kept: list[object] = []  # what has these ids must live as long

    @property
    def servers(self) -> Servers:
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
            ConfigError: there are more servers than parameters.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        places = place([p.numel() * p.element_size() for p in parameters], self._count)
        self._places |= {id(p): place for p, place in zip(parameters, places, strict=True)}
        self._kept += parameters
        if self._reached is None:
            self._reached = self._connect()

    def known(self, optimizer: Optimizer) -> Known:
        """Return an optimizer as the servers know it.

        At first they take it over with weights and state as they are here, unless another worker
        was first.
        """
        if id(optimizer) in self._known:
            return self._known[id(optimizer)]
        by_server: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._places:
                by_server.setdefault(self._places[id(parameter)], []).append(parameter)
        known = Known(len(self._known), by_server)
        parts = {index: (known.number, part_of(optimizer, p)) for index, p in by_server.items()}
        self.servers.call(server.begin, parts)
        self._known[id(optimizer)] = known
        self._kept.append(optimizer)
        return known

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing: the weights have come already."""

    def close(self, *, in_order: bool) -> None:
        """Part from the servers. May be called again."""
        if self._reached is not None:
            self._reached.close(in_order=in_order)


def sent(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient as it is sent."""
    return None if parameter.grad is None else parameter.grad.detach().cpu()


def receive(known: Known, weights: Mapping[int, list[Tensor]]) -> None:
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
