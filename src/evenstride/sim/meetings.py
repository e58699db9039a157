"""How workers that keep step wait for each other and communicate, a step at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.sync import Delayed, LocalSgd, Served, SyncMode
from evenstride.sim.links import Queues
from evenstride.sim.scenario import Communication


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """What comes of a step.

    Args:
        begin_s: when each worker may begin the next one, ``(W,)``.
        steps: how many steps are part of the model now that were not before, the oldest first.
        staleness: of each update of the model by which they became so.
    """

    begin_s: FloatArray
    steps: int = 0
    staleness: tuple[int, ...] = ()


class Meeting(Protocol):
    """What happens between the workers' steps; all times are absolute, in seconds."""

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return what comes of a step that each worker has computed by ``done_s``, ``(W,)``."""
        ...

    def gather(self, done_s: FloatArray) -> Met:
        """Bring together all who are there, with all that is not part of the model yet."""
        ...


class AllTogether:
    """All wait for the slowest, then for an all-reduce: ``bsp``.

    Args:
        links: between the workers.
    """

    def __init__(self, links: Communication) -> None:
        self._links = links

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return what comes of a step."""
        del step
        return Met(_reduced(self._links, done_s), 1, (0,))

    def gather(self, done_s: FloatArray) -> Met:
        """Return what comes of it: nothing new, as all is part of the model already."""
        return Met(done_s)


class AtServers:
    """Who is done pushes; servers update when all have, and send the weights: ``bsp-ps``.

    Args:
        links: between workers and servers.
        servers: how many there are.
    """

    def __init__(self, links: Communication, servers: int) -> None:
        self._queues = Queues(links.served_by(servers))

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return what comes of a step."""
        del step
        order = np.argsort(done_s, kind="stable")
        arrived_s = list[float]()
        for at_s in done_s[order].tolist():
            arrived_s = self._queues.push(at_s)
        updated_s = self._queues.update(arrived_s)
        begin_s = np.empty_like(done_s)
        begin_s[order] = [self._queues.pull(updated_s) for _ in order]
        return Met(begin_s, 1, (0,))

    def gather(self, done_s: FloatArray) -> Met:
        """Return what comes of it: nothing new, as all is part of the model already."""
        return Met(done_s)


class Averages:
    """Workers train by themselves, and average their weights from time to time: ``local-sgd``.

    Args:
        links: between the workers.
        every: steps from one average to the next.
        after: steps of ``bsp`` first.
    """

    def __init__(self, links: Communication, every: int, after: int) -> None:
        self._links, self._every, self._first = links, every, after
        self._open = 0

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return what comes of a step: an average, if the round is over."""
        self._open += 1
        if step >= self._first and self._open < self._every:
            return Met(done_s)
        return self.gather(done_s)

    def gather(self, done_s: FloatArray) -> Met:
        """Return what comes of an average of those who are there."""
        steps, self._open = self._open, 0
        if not steps:
            return Met(done_s)
        return Met(_reduced(self._links, done_s), steps, (0,))


class Behind:
    """A step's all-reduce runs beside the next step, at whose end it is applied: ``delayed``.

    Args:
        links: between the workers.
    """

    def __init__(self, links: Communication) -> None:
        self._links = links
        self._under_way: deque[tuple[float, int]] = deque()  # ends and staleness, not applied yet
        self._free_s = -inf  # when the links are free again

    def after(self, step: int, done_s: FloatArray) -> Met:
        """Return what comes of a step: what the all-reduce of the one before brings."""
        del step
        began_s = max(float(done_s.max()), self._free_s)
        self._free_s = began_s + self._links.step_s(len(done_s))
        alone = not self._under_way  # when this step began, all before it was applied
        self._under_way.append((self._free_s, 0 if alone else 1))
        return Met(done_s) if alone else self._applied(done_s, 1)

    def gather(self, done_s: FloatArray) -> Met:
        """Return what comes of it when all wait for what is under way."""
        if not self._under_way:
            return Met(done_s)
        met = self._applied(done_s, len(self._under_way))
        return Met(np.full_like(done_s, met.begin_s.max()), met.steps, met.staleness)

    def _applied(self, done_s: FloatArray, steps: int) -> Met:
        ends = [self._under_way.popleft() for _ in range(steps)]
        begin_s = np.maximum(done_s, max(end_s for end_s, _ in ends))
        return Met(begin_s, steps, tuple(staleness for _, staleness in ends))


def meeting(mode: SyncMode, links: Communication) -> Meeting:
    """Return how workers meet in a mode in which they keep step."""
    match mode:
        case Served():
            return AtServers(links, mode.servers)
        case LocalSgd():
            return Averages(links, mode.every, mode.after)
        case Delayed():
            return Behind(links)
    return AllTogether(links)


def _reduced(links: Communication, done_s: FloatArray) -> FloatArray:
    """Return when all have the result of an all-reduce that all take part in when done."""
    return np.full_like(done_s, float(done_s.max()) + links.step_s(len(done_s)))
