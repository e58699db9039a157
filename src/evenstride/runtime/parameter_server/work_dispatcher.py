"""Who trains which samples next, and who may go on, where workers do not keep step.

On the first server only. Workers ask it by RPC, and are answered as soon as they can be.
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


def taken_for_lost(worker: int) -> str:
    """Return what a worker is told that was taken for lost, and asks for something."""
    return (
        f"worker {worker} was taken for lost, and its samples are trained by others; start the run "
        "again: with checkpoints it goes on from the newest one"
    )


# What `take` answers a worker that has pieces in hand while there is nothing to give: train these,
# and ask again.
LATER: Stretches = []


class Take(NamedTuple):
    """A worker that asks for samples."""

    worker: int
    epoch: int  # that it is in
    end: int  # samples of the epoch
    samples: int  # that it would have
    most: int | None  # samples that the run trains, over all epochs; `None` for no limit
    answer: Answer  # positions from and to; `None` once the epoch is over


class WorkDispatcher:
    """Hands out one epoch after the other by `AsyncSchedule`, and answers workers that wait.

    All workers begin an epoch together and end it together: who finds nothing left waits until all
    that was given is trained, in case some of it comes back. Without a bound ``staleness`` is
    ``None``.
    """

    def __init__(self, workers: int, staleness: int | None) -> None:
        self._lock = threading.Lock()
        self._workers, self._live = workers, set(range(workers))
        self._schedule = AsyncSchedule.of(workers, staleness)
        self._stale = [Staleness() for _ in range(workers)]
        self._epoch = -1
        self._takes: list[Take] = []
        self._turns: list[tuple[int, Turn]] = []
        self._due: list[Callable[[], None]] = []  # answers to give as soon as the lock is free
        self._told = set(range(workers))  # that the epoch is over
        self._before = 0  # samples trained in earlier epochs
        self._trained = [0] * workers  # samples, in the present epoch
        self._split: tuple[int, ...] = ()  # what that came to in the epoch that ended last
        self._present: tuple[int, ...] | None = None  # what was answered since it ended
        self._again, self._ahead = 0, 0

    def take(
        self, worker: int, epoch: int, end: int, samples: int, most: int | None = None
    ) -> Answer:
        """Return the stretches of positions that a worker is to train next, once there are some.

        ``None`` if the epoch is over, and `LATER` if the worker has others in hand yet.
        """
        answer: Answer = torch.futures.Future()
        with self._answering():
            self.require(worker)
            self._takes.append(Take(worker, epoch, end, samples, most, answer))
        return answer

    def require(self, worker: int) -> None:
        """Refuse the update of a worker that was taken for lost: others train its samples."""
        if worker not in self._live:
            raise RuntimeError(taken_for_lost(worker))

    def made(self, worker: int, staleness: int) -> tuple[bool, int]:
        """Book an update; return whether the worker may go on, and the samples trained so far.

        Raises:
            RuntimeError: the worker was taken for lost.
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
        """Return when the worker may begin its next update."""
        turn: Turn = torch.futures.Future()
        with self._answering():
            self.require(worker)
            self._turns.append((worker, turn))
        return turn

    def release(self, worker: int) -> None:
        """Take back what a worker has in hand: it left its loop, and is not waited for."""
        with self._answering():
            self.require(worker)
            self._take_back(self._schedule.returned(worker))
            why = f"worker {worker} left its loop, and is given nothing; begin another to go on"
            self._refuse(worker, why)

    def gone(self, worker: int) -> None:
        """Take back what a worker has in hand, and wait for it no longer. May be told again."""
        with self._answering():
            if worker in self._live:
                self._live.discard(worker)
                self._take_back(self._schedule.lost(worker))
                self._refuse(worker, taken_for_lost(worker))

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; one answer for all who ask between two epochs.

        Who asks first is told how it is, and the others the same, until the next epoch begins:
        what all do together is done by the same workers then, also if one is lost meanwhile.
        """
        with self._lock:
            now = tuple(sorted(self._live))
            if not self._schedule.queue.done:
                return now
            if self._present is None:
                self._present = now
            return self._present

    def report(self) -> dict[str, Any]:
        """Return what there is to tell of the run so far.

        Returns:
            ``count``, ``mean``, ``maximum`` and ``histogram`` of all updates' staleness, and the
            same under ``workers``; ``most_ahead``, updates by which one that had just been made
            was ahead of the slowest; ``handed_out_again``, samples that were lost with a worker;
            ``gone``, the workers that have ended; ``position``, the samples that are trained of
            the present epoch; ``trained``, the samples that each worker has
            trained in the epoch that ended last, empty if there were none.
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
        """Hold the lock for a change, then answer whoever can be answered after it."""
        with self._lock:
            yield
            self._look()
            due, self._due = self._due, []
        # Outside the lock: what waits for an answer runs inside the call that gives it.
        for call in due:
            call()

    def _answer(self, future: torch.futures.Future[Any], value: object) -> None:
        self._due.append(lambda: future.set_result(value))

    def _take_back(self, after: AsyncSchedule) -> None:
        self._again += self._schedule.queue.out - after.queue.out
        self._schedule = after

    def _refuse(self, worker: int, why: str) -> None:
        """Refuse what a worker waits for: it is not to be given anything any more."""
        takes = [(take.worker, take.answer) for take in self._takes]
        waiting: list[tuple[int, torch.futures.Future[Any]]] = [*takes, *self._turns]
        for other, future in waiting:
            if other == worker:
                self._due.append(partial(future.set_exception, RuntimeError(why)))
        self._takes = [take for take in self._takes if take.worker != worker]
        self._turns = [(other, turn) for other, turn in self._turns if other != worker]

    def _look(self) -> None:
        self._end_epoch()
        # All are tried again, since samples of a lost worker may have come back.
        self._takes = [take for take in self._takes if self._beyond(take) or not self._give(take)]
        waiting, self._turns = self._turns, []
        for worker, turn in waiting:
            if self._schedule.may_begin(worker):
                self._answer(turn, None)
            else:
                self._turns.append((worker, turn))

    def _end_epoch(self) -> None:
        """Tell if the epoch is over, and begin the next when all have asked for it.

        Which is the next is for them to say: they may go back, or leave the rest of one.
        """
        if self._schedule.queue.done:
            self._split = tuple(self._trained) if any(self._trained) else ()
            for take in [take for take in self._takes if not self._beyond(take)]:
                self._takes.remove(take)
                self._told.add(take.worker)
                self._answer(take.answer, None)
            for _, turn in self._turns:  # nobody is behind any more
                self._answer(turn, None)
            self._turns = []
        ready = {take.worker for take in self._takes if self._beyond(take)}
        if ready and ready >= self._live:
            self._begin_epoch(self._takes[0])
            if self._schedule.queue.done:  # the run has trained all that it is to
                self._end_epoch()

    def _begin_epoch(self, first: Take) -> None:
        self._before += self._schedule.queue.position
        left = first.end if first.most is None else max(first.most - self._before, 0)
        self._epoch = first.epoch
        self._schedule = self._schedule.opened(min(first.end, left))
        self._told = set()
        self._trained, self._present = [0] * self._workers, None

    def _beyond(self, take: Take) -> bool:
        return take.worker in self._told or take.epoch != self._epoch

    def _give(self, take: Take) -> bool:
        if self._schedule.queue.done:
            return False
        self._schedule, piece = self._schedule.given(take.worker, take.samples)
        if piece:
            self._answer(take.answer, [(s.start, s.stop) for s in piece])
        elif take.worker not in self._schedule.idle:
            self._answer(take.answer, LATER)
        return take.worker not in self._schedule.idle
