"""The time of communication: a ring of all workers, or parameter servers with queues.

Both models have one kind of link, with a bandwidth each way and a latency for each message of any
size. They ignore the processor's work, packets and switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Ring:
    """An all-reduce in a ring: ``2 (W - 1)`` messages, each of a W-th of the bytes.

    Source:
        The cost model of the ring all-reduce (Patarasuk & Yuan, JPDC 2009). Its bandwidth term,
        ``2 (W - 1) / W * bytes / bandwidth``, is that of the performance notes of NVIDIA's
        nccl-tests, which were read; there it is the lower limit of any all-reduce.

    >>> Ring(latency_s=0.001, bytes_per_s=100.0, gradient_bytes=50.0).all_reduce_s(workers=2)
    0.502
    """

    latency_s: float  # of each message
    bytes_per_s: float  # of the slowest link
    gradient_bytes: float  # size on every worker

    def all_reduce_s(self, workers: int) -> float:
        """Return the seconds from when all workers have begun to when all have the result."""
        part_s = self.gradient_bytes / max(workers, 1) / self.bytes_per_s
        return 2 * (workers - 1) * (self.latency_s + part_s)


@dataclass(frozen=True, slots=True)
class ParameterServers:
    """Servers with an equal part of the model each, and a link of its own each way.

    A push sends a part to each server, one after the other over the worker's own link. Each server
    receives the parts in order of arrival and updates its part of the model, one update at a time.
    Its response contains the weights. A message that finds a link or a server busy waits in a
    queue, first come, first served.

    Source:
        Ours; not compared with measurements yet.
    """

    servers: int  # at least 1
    latency_s: float  # of each message
    bytes_per_s: float  # of every link, each way
    gradient_bytes: float  # size of a whole gradient; the weights have the same size
    update_s: float = 0.0  # time of one process to update the whole model

    @property
    def part_s(self) -> float:
        """Seconds of a server's part of the model on one link."""
        return self.gradient_bytes / self.servers / self.bytes_per_s

    def all_reduce_s(self, workers: int) -> float:
        """Return the time of a step beyond the workers' busy time, if that is the same for all.

        ``S`` servers send the weights to ``W`` workers one after the other, a part each. So workers
        begin a step one part's time apart and end it so, and their pushes follow one another
        without a queue. From the last update of one step to the last of the next it takes

            2 latency + (W + 2 S - 1) bytes / (S bandwidth) + update / S

        seconds: the last worker's weights arrive after ``W + S - 1`` parts, and its gradient takes
        ``S``. `Queues` gives the same, step after step. It ignores that a server's machine also
        trains, and that its link carries both.

        >>> ParameterServers(1, 0.5, 10.0, 10.0, update_s=2.0).all_reduce_s(2)
        6.0
        """
        parts_s = (workers + 2 * self.servers - 1) * self.part_s
        return 2 * self.latency_s + parts_s + self.update_s / self.servers


class Queues:
    """The times until which the servers' links and processors are busy.

    All calls must be in order of time: the first request is served first.

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
        """Return when each server has its part of a gradient, sent from a time on."""
        part_s = self.model.part_s
        for server, taken_s in enumerate(self._in_s):
            sent_s = at_s + server * part_s + self.model.latency_s
            self._in_s[server] = max(taken_s, sent_s) + part_s
        return list(self._in_s)

    def update(self, arrived_s: Sequence[float]) -> float:
        """Return when all servers have updated their parts, each after its own has arrived."""
        update_s = self.model.update_s / self.model.servers
        for server, (taken_s, at_s) in enumerate(zip(self._work_s, arrived_s, strict=True)):
            self._work_s[server] = max(taken_s, at_s) + update_s
        return max(self._work_s)

    def pull(self, at_s: float) -> float:
        """Return when a worker has the weights, sent by the servers from a time on."""
        part_s, got_s = self.model.part_s, at_s
        for server, taken_s in enumerate(self._out_s):
            self._out_s[server] = max(taken_s, at_s) + part_s
            got_s = max(got_s + part_s, self._out_s[server])
        return got_s + self.model.latency_s
