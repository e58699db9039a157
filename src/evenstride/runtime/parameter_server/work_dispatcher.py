"""Assigns samples to workers in asynchronous modes, and decides which worker may continue.

It exists on the first server only. Workers call it by RPC and get their answer as soon as possible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from evenstride.core.sync_modes.async_schedule import AsyncSchedule, Staleness, staleness_report

Stretches = list[tuple[int, int]]
Answer = torch.futures.Future[Stretches | None]
Turn = torch.futures.Future[None]


def declared_lost(worker: int) -> str:
    """Return the message for calls of a worker that was declared lost."""
    return (
        f"worker {worker} was declared lost, and its samples were reassigned to other workers; "
        "restart the run, which continues from its newest checkpoint, if it saves checkpoints"
    )


# The answer of `take` if all samples are assigned and the worker still has untrained ones: it must
# train these and ask again.
LATER: Stretches = []


class Take(NamedTuple):
    """A worker's request for samples."""

    worker: int
    epoch: int  # of the worker
    end: int  # samples of the epoch
    samples: int  # requested samples
    most: int | None  # samples that the run trains, over all epochs; `None` for no limit
    answer: Answer  # ranges of positions; `None` when the epoch is over


class WorkDispatcher:
    """Assigns the samples of each epoch by `AsyncSchedule`, and answers waiting workers.

    All workers begin and end an epoch together. When no samples are left, a worker waits until all
    assigned ones are trained, because some may be returned. ``staleness`` is ``None`` if it is not
    limited.
    """

    def __init__(self, workers: int, staleness: int | None) -> None:
        self._lock = threading.Lock()
        self._workers, self._live = workers, set(range(workers))
        self._schedule = AsyncSchedule.of(workers, staleness)
        self._stale = [Staleness() for _ in range(workers)]
        self._epoch = -1
        self._takes: list[Take] = []
        self._turns: list[tuple[int, Turn]] = []
        self._due: list[Callable[[], None]] = []  # answers to send when the lock is free
        self._done = set(range(workers))  # workers that know that the epoch is over
        self._before = 0  # samples trained in earlier epochs
        self._trained = [0] * workers  # samples of each worker in the current epoch

        self._split: tuple[int, ...] = ()  # the same in the last finished epoch
        self._present: tuple[int, ...] | None = None  # answer of `present` since that epoch's end
        self._again, self._ahead = 0, 0

    def take(
        self, worker: int, epoch: int, end: int, samples: int, most: int | None = None
    ) -> Answer:
        """Return the ranges of positions that a worker must train next, when available.

        It is ``None`` if the epoch is over, and `LATER` if the worker still has untrained samples.
        """
        answer: Answer = torch.futures.Future()
        with self._answering():
            self.require(worker)
            self._takes.append(Take(worker, epoch, end, samples, most, answer))
        return answer

    def require(self, worker: int) -> None:
        """Refuse the calls of a worker that was declared lost: others train its samples."""
        if worker not in self._live:
            raise RuntimeError(declared_lost(worker))

    def made(self, worker: int, staleness: int) -> tuple[bool, int]:
        """Record an update; return whether the worker may continue, and the trained samples.

        Raises:
            RuntimeError: the worker was declared lost.
        """
        with self._answering():
            self.require(worker)
            before = self._schedule.queue.position
            self._schedule = self._schedule.made(worker)
            position = self._schedule.queue.position
            self._trained[worker] += position - before
            self._stale[worker] = self._stale[worker].counted(staleness)
            self._ahead = max(self._ahead, self._schedule.ahead(worker))
            return self._schedule.may_begin(worker), position

    def turn(self, worker: int) -> Turn:
        """Return a future that completes when the worker may begin its next update."""
        turn: Turn = torch.futures.Future()
        with self._answering():
            self.require(worker)
            self._turns.append((worker, turn))
        return turn

    def release(self, worker: int) -> None:
        """Take back a worker's untrained samples, because it stopped iterating early."""
        with self._answering():
            self.require(worker)
            self._take_back(self._schedule.returned(worker))
            why = f"worker {worker} stopped iterating early, so it gets no samples; iterate again"
            self._refuse(worker, why)

    def gone(self, worker: int) -> None:
        """Take back a lost worker's samples, and stop waiting for it. May be called again."""
        with self._answering():
            if worker in self._live:
                self._live.discard(worker)
                self._take_back(self._schedule.lost(worker))
                self._refuse(worker, declared_lost(worker))

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; between two epochs all callers get the same.

        The first call after the end of an epoch determines the answer until the next epoch begins.
        So collective work in between has the same workers, even if one is lost meanwhile.
        """
        with self._lock:
            now = tuple(sorted(self._live))
            if not self._schedule.queue.done:
                return now
            if self._present is None:
                self._present = now
            return self._present

    def report(self) -> dict[str, Any]:
        """Return the statistics of the run so far.

        Returns:
            ``count``, ``mean``, ``maximum`` and ``histogram`` of the staleness of all updates, and
            the same per worker under ``workers``. ``most_ahead``: the most updates by which a
            worker was ahead of the slowest one after an update. ``handed_out_again``: samples
            that were returned or lost with a worker. ``gone``: the workers that have ended.
            ``position``: the trained samples of the current epoch. ``trained``: the samples
            that each worker trained in the last finished epoch, empty before that.
        """
        with self._lock:
            more = {
                "most_ahead": self._ahead,
                "handed_out_again": self._again,
                "gone": sorted(set(range(self._workers)) - self._live),
                "position": self._schedule.queue.position,
                "trained": self._split,
            }
            return {**staleness_report(self._stale), **more}

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Hold the lock for a change, then send all answers that it makes possible."""
        with self._lock:
            yield
            self._look()
            due, self._due = self._due, []
        # Outside the lock: the callbacks of a future run inside the call that completes it.
        for call in due:
            call()

    def _answer(self, future: torch.futures.Future[Any], value: object) -> None:
        self._due.append(lambda: future.set_result(value))

    def _take_back(self, after: AsyncSchedule) -> None:
        self._again += self._schedule.queue.out - after.queue.out
        self._schedule = after

    def _refuse(self, worker: int, why: str) -> None:
        """Refuse a worker's pending requests."""
        takes = [(take.worker, take.answer) for take in self._takes]
        waiting: list[tuple[int, torch.futures.Future[Any]]] = [*takes, *self._turns]
        for other, future in waiting:
            if other == worker:
                self._due.append(partial(future.set_exception, RuntimeError(why)))
        self._takes = [take for take in self._takes if take.worker != worker]
        self._turns = [(other, turn) for other, turn in self._turns if other != worker]

    def _look(self) -> None:
        self._end_epoch()
        # All requests are tried again, because samples of a lost worker may have been returned.
        self._takes = [take for take in self._takes if self._beyond(take) or not self._give(take)]
        waiting, self._turns = self._turns, []
        for worker, turn in waiting:
            if self._schedule.may_begin(worker):
                self._answer(turn, None)
            else:
                self._turns.append((worker, turn))

    def _end_epoch(self) -> None:
        """Announce the end of the epoch, and begin the next one when all workers request it.

        The workers choose the next epoch: they may go back, or skip the rest of one.
        """
        if self._schedule.queue.done:
            self._split = tuple(self._trained) if any(self._trained) else ()
            for take in [take for take in self._takes if not self._beyond(take)]:
                self._takes.remove(take)
                self._done.add(take.worker)
                self._answer(take.answer, None)
            for _, turn in self._turns:  # no worker is behind now
                self._answer(turn, None)
            self._turns = []
        ready = {take.worker for take in self._takes if self._beyond(take)}
        if ready and ready >= self._live:
            self._begin_epoch(self._takes[0])
            if self._schedule.queue.done:  # the run has reached its limit
                self._end_epoch()

    def _begin_epoch(self, first: Take) -> None:
        self._before += self._schedule.queue.position
        left = first.end if first.most is None else max(first.most - self._before, 0)
        self._epoch = first.epoch
        self._schedule = self._schedule.opened(min(first.end, left))
        self._done = set()
        self._trained, self._present = [0] * self._workers, None

    def _beyond(self, take: Take) -> bool:
        return take.worker in self._done or take.epoch != self._epoch

    def _give(self, take: Take) -> bool:
        if self._schedule.queue.done:
            return False
        self._schedule, piece = self._schedule.given(take.worker, take.samples)
        if piece:
            self._answer(take.answer, [(s.start, s.stop) for s in piece])
        elif take.worker not in self._schedule.idle:
            self._answer(take.answer, LATER)
        return take.worker not in self._schedule.idle
