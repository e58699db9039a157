"""What communication takes: a ring of all workers, or parameter servers with queues.

Both know one kind of link: so many bytes per second each way, and a latency for each message,
however small. No model knows of the processor's part in it, of packets, or of switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Ring:
    """An all-reduce in a ring: ``2 (W - 1)`` messages, each of a W-th of the bytes.

    Source:
        The cost model of the ring all-reduce (Patarasuk & Yuan, JPDC 2009). Its term of bandwidth,
        ``2 (W - 1) / W * bytes / bandwidth``, is that of the notes on performance of NVIDIA's
        nccl-tests, which were read; there it is the least that any all-reduce takes.

    >>> Ring(latency_s=0.001, bytes_per_s=100.0, gradient_bytes=50.0).all_reduce_s(workers=2)
    0.502
    """

    latency_s: float  # of each message
    bytes_per_s: float  # of the slowest link
    gradient_bytes: float  # that every worker holds

    def all_reduce_s(self, workers: int) -> float:
        """Return the seconds from when all have begun to when all have the result."""
        part_s = self.gradient_bytes / max(workers, 1) / self.bytes_per_s
        return 2 * (workers - 1) * (self.latency_s + part_s)


@dataclass(frozen=True, slots=True)
class ParameterServers:
    """Servers with an equal part of the model each, and a link of its own each way.

    A push sends a part to each server, one after the other over the worker's own link; each server
    takes the parts in as they come, updates its part of the model, one update at a time, and its
    answer brings the weights. What finds a link or a server taken waits in line, first come, first
    served.

    Source:
        Ours; measured against nothing yet.
    """

    servers: int  # at least 1
    latency_s: float  # of each message
    bytes_per_s: float  # of every link, each way
    gradient_bytes: float  # of a whole gradient; the weights have as many
    update_s: float = 0.0  # that one process would take to update the whole model

    @property
    def part_s(self) -> float:
        """Seconds that a server's part of the model takes over one link."""
        return self.gradient_bytes / self.servers / self.bytes_per_s

    def all_reduce_s(self, workers: int) -> float:
        """Return what a step takes beside the workers' own time, if that is the same for all.

        ``S`` servers send the weights to ``W`` workers one after the other, a part each. So workers
        begin a step one part's time apart, end it so, and their pushes follow one another without
        waiting in line. From the last update of one step to the last of the next it takes

            2 latency + (W + 2 S - 1) bytes / (S bandwidth) + update / S

        seconds: the last worker's weights come after ``W + S - 1`` parts, and its gradient takes
        ``S``. `Queues` gives the same, step after step. That a server's machine trains as well, and
        its link carries both, is not in it.

        >>> ParameterServers(1, 0.5, 10.0, 10.0, update_s=2.0).all_reduce_s(2)
        6.0
        """
        parts_s = (workers + 2 * self.servers - 1) * self.part_s
        return 2 * self.latency_s + parts_s + self.update_s / self.servers


class Queues:
    """How long the servers' links and processors are taken already.

    All calls come in order of time: what was asked for first is served first.

    >>> queues = Queues(ParameterServers(1, 0.5, 10.0, 10.0, update_s=2.0))
    >>> queues.update(queues.push(0.0)), queues.update(queues.push(0.0))
    (3.5, 5.5)
    >>> queues.pull(3.5), queues.pull(3.5)
    (5.0, 6.0)
    """

    def __init__(self, model: ParameterServers) -> None:
        self.model = model
        self._in_s = [-inf] * model.servers
        self._work_s = [-inf] * model.servers
        self._out_s = [-inf] * model.servers

    def push(self, at_s: float) -> list[float]:
        """Return when each server has the part of a gradient that is sent from a time on."""
        part_s = self.model.part_s
        for server, taken_s in enumerate(self._in_s):
            sent_s = at_s + server * part_s + self.model.latency_s
            self._in_s[server] = max(taken_s, sent_s) + part_s
        return list(self._in_s)

    def update(self, arrived_s: Sequence[float]) -> float:
        """Return when all servers have updated their parts, each when its own has arrived."""
        update_s = self.model.update_s / self.model.servers
        for server, (taken_s, at_s) in enumerate(zip(self._work_s, arrived_s, strict=True)):
            self._work_s[server] = max(taken_s, at_s) + update_s
        return max(self._work_s)

    def pull(self, at_s: float) -> float:
        """Return when a worker has the weights that the servers send it from a time on."""
        part_s, got_s = self.model.part_s, at_s
        for server, taken_s in enumerate(self._out_s):
            self._out_s[server] = max(taken_s, at_s) + part_s
            got_s = max(got_s + part_s, self._out_s[server])
        return got_s + self.model.latency_s
