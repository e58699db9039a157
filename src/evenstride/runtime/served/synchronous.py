"""Synchronous training over parameter servers: one worker's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from evenstride.core.placing import place
from evenstride.core.weighting import loss_factor
from evenstride.runtime.sampler import Draw
from evenstride.runtime.served import server
from evenstride.runtime.served.calls import Servers
from evenstride.runtime.served.shard import parameters_of, part_of, settings_of


@dataclass(frozen=True, slots=True)
class Known:
    """An optimizer that the servers step.

    Args:
        number: of it; the first to step is the first on every rank.
        parameters: of it, by server, in the order in which they are sent.
    """

    number: int
    parameters: dict[int, list[nn.Parameter]]


class Synchronous:
    """Sends every step's gradients to the servers, waits for all others', and gets weights back.

    The mean of gradients, the update and the distribution of weights are where the parameter-server
    papers have them; the result is that of an all-reduce up to rounding.

    Args:
        rank: of this worker.
        world_size: number of workers.
        servers: number of servers.
        connect: starts and reaches them; collective.
    """

    def __init__(
        self, rank: int, world_size: int, servers: int, connect: Callable[[], Servers]
    ) -> None:
        self._rank, self._world_size, self._count = rank, world_size, servers
        self._connect = connect
        self._servers: Servers | None = None
        self._places: dict[int, int] = {}  # server of each parameter, by its id
        self._known: dict[int, Known] = {}  # by the optimizer's id
        self._kept: list[object] = []  # what has these ids must live as long

    def factor(self, draw: Draw) -> float:
        """Return what makes the mean over workers the mean over samples."""
        return loss_factor(self._world_size, draw.samples, draw.window)

    def watch(self, module: nn.Module) -> None:
        """Deal a module's parameters out to the servers; collective.

        Raises:
            ConfigError: there are more servers than parameters.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        places = place([p.numel() * p.element_size() for p in parameters], self._count)
        self._places |= {id(p): place for p, place in zip(parameters, places, strict=True)}
        self._kept += parameters
        if self._servers is None:
            self._servers = self._connect()

    def before_step(self, optimizer: Optimizer) -> None:
        """Replace this worker's gradients by the weights that all workers' lead to."""
        assert self._servers is not None, "a model is watched before it is trained"
        known = self._known.get(id(optimizer)) or self._introduce(optimizer, self._servers)
        settings = settings_of(optimizer)
        pushes = {
            index: (known.number, self._rank, settings, [_sent(p) for p in mine])
            for index, mine in known.parameters.items()
        }
        answers = self._servers.call(server.push, pushes)
        with torch.no_grad():
            for index, mine in known.parameters.items():
                for parameter, weights in zip(mine, answers[index], strict=True):
                    parameter.copy_(weights)
                    parameter.grad = None  # so that the optimizer here does nothing

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing: the weights have come already."""

    def close(self, *, in_order: bool) -> None:
        """Part from the servers."""
        if self._servers is not None:
            self._servers.close(in_order=in_order)

    def _introduce(self, optimizer: Optimizer, servers: Servers) -> Known:
        """Let the servers take over an optimizer, with weights and state as they are here."""
        mine = [p for p in parameters_of(optimizer) if id(p) in self._places]
        by_server: dict[int, list[nn.Parameter]] = {}
        for parameter in mine:
            by_server.setdefault(self._places[id(parameter)], []).append(parameter)
        known = Known(len(self._known), by_server)
        parts = {index: (known.number, part_of(optimizer, p)) for index, p in by_server.items()}
        servers.call(server.begin, parts)
        self._known[id(optimizer)] = known
        self._kept.append(optimizer)
        return known


def _sent(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.detach().cpu()
