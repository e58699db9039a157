"""Synchronous training over parameter servers: one worker's side."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.runtime.parameter_server import server
from evenstride.runtime.parameter_server.parameter_shard import settings_of
from evenstride.runtime.parameter_server.server_calls import ServerConnections
from evenstride.runtime.parameter_server.server_worker import ServedWorker, receive, sent


class Synchronous(ServedWorker):
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
        self, rank: int, world_size: int, servers: int, connect: Callable[[], ServerConnections]
    ) -> None:
        super().__init__(servers, connect)
        self._rank, self._world_size = rank, world_size

    def factor(self, draw: Draw) -> float:
        """Return what makes the mean over workers the mean over samples."""
        return loss_factor(self._world_size, draw.samples, draw.window)

    def before_step(self, optimizer: Optimizer) -> None:
        """Replace this worker's gradients by the weights that all workers' lead to."""
        known, settings = self.known(optimizer), settings_of(optimizer)
        pushes = {
            index: (known.number, self._rank, settings, [sent(p) for p in mine])
            for index, mine in known.parameters.items()
        }
        receive(known, self.servers.call(server.push, pushes))
