"""What it takes until all workers have the sum of their gradients, or the weights it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenstride.core.sync_modes.mode_specs import AllReduce, ParameterServerMode, sync_from_spec
from evenstride.errors import ConfigError
from evenstride.sim.engine.network import ParameterServers


class Reduces(Protocol):
    """Communication of a step, by the number of workers; `sim.engine.network.Ring` is one."""

    def all_reduce_s(self, workers: int) -> float:
        """Return the seconds that a step takes beside the workers' own time."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLinks:
    """Parameter servers, with workers whose steps take equally long.

    ``S`` servers send the weights to ``W`` workers one after the other, a part each. So workers
    begin a step one part's time apart, end it so, and their pushes follow one another without
    waiting in line. From the last update of one step to the last of the next it takes, beside a
    worker's own time,

        2 latency + (W + 2 S - 1) bytes / (S bandwidth) + update / S

    seconds: the last worker's weights come after ``W + S - 1`` parts, and its gradient takes ``S``.

    Source:
        ``sim.engine.network.Queues``, step after step.

    >>> ServerLinks(ParameterServers(1, 0.5, 10.0, 10.0, update_s=2.0)).all_reduce_s(2)
    6.0
    """

    # Servers and links; that a server's machine trains as well, and its link carries both, is not
    # in it
    model: ParameterServers

    def all_reduce_s(self, workers: int) -> float:
        """Return the seconds that a step takes beside the workers' own time."""
        model = self.model
        parts_s = (workers + 2 * model.servers - 1) * model.part_s
        return 2 * model.latency_s + parts_s + model.update_s / model.servers


def servers_of(sync: str) -> int:
    """Return how many parameter servers a mode has; 0 for the all-reduce.

    Raises:
        ConfigError: it is no mode, or one that no plan can be made for.
    """
    mode = sync_from_spec(sync)
    if not isinstance(mode, AllReduce | ParameterServerMode):
        raise ConfigError(
            f"no plan can be made for {sync}, as how many epochs it takes is another question; "
            "plan for bsp, or bsp-ps(servers=1)"
        )
    return mode.servers
