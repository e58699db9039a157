"""Who trains which samples next, and who may go on, where workers do not keep step.

On the first server only. Workers ask it by RPC, and are answered as soon as they can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from evenstride.core.sampling.work_queue import WorkQueue
from evenstride.core.sync_modes.staleness import Clocks, Staleness, staleness_report

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
    """A worker that asks for samples.

    Args:
        worker: who asks.
        epoch: that it is in.
        end: samples of the epoch.
        samples: that it would have.
        most: samples that the run trains, over all epochs; ``None`` for no limit.
        answer: positions from and to; ``None`` once the epoch is over.
    """

    worker: int
    epoch: int
    end: int
    samples: int
    most: int | None
    answer: Answer


@dataclass(slots=True)
class _Due:
    """Answers to give as soon as the lock is free."""

    calls: list[Callable[[], None]] = field(default_factory=list)

    def answer(self, future: torch.futures.Future[Any], value: object) -> None:
        """Note an answer."""
        self.calls.append(lambda: future.set_result(value))

    def refuse(self, future: torch.futures.Future[Any], why: str) -> None:
        """Note that there will be no answer."""
        error: Any = RuntimeError(why)
        self.calls.append(lambda: future.set_exception(error))

    def give(self) -> None:
        """Give all of them."""
        for call in self.calls:
            call()


class WorkDispatcher:
    """Hands out the samples of one epoch after the other, each once, and keeps the clocks.

    All workers begin an epoch together and end it together: who finds nothing left waits until all
    that was given is trained, in case some of it comes back. Meanwhile nobody waits for it.

    Args:
        workers: how many there are.
        staleness: the bound for `Clocks`; ``None`` for none.
    """

    def __init__(self, workers: int, staleness: int | None) -> None:
        self._lock = threading.Lock()
        self._workers, self._live = workers, set(range(workers))
        self._clocks = Clocks.of(workers, staleness)
        self._stale = [Staleness() for _ in range(workers)]
        self._epoch, self._handout = -1, WorkQueue.of(0, workers)
        self._takes: list[Take] = []
        self._turns: list[tuple[int, Turn]] = []
        self._idle: set[int] = set()  # have nothing to train, and there is nothing to give
        self._away: set[int] = set()  # have left their loop
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
        asked = Take(worker, epoch, end, samples, most, torch.futures.Future())
        with self._lock:
            self.require(worker)
            self._away.discard(worker)
            self._takes.append(asked)
            due = self._look()
        # Outside the lock: what waits for an answer runs inside the call that gives it.
        due.give()
        return asked.answer

    def require(self, worker: int) -> None:
        """Refuse the update of a worker that was taken for lost: others train its samples.

        Raises:
            RuntimeError: it was.
        """
        if worker not in self._live:
            raise RuntimeError(taken_for_lost(worker))

    def made(self, worker: int, staleness: int) -> tuple[bool, int]:
        """Book an update; return whether the worker may go on, and the samples trained so far.

        Raises:
            RuntimeError: the worker was taken for lost.
        """
        with self._lock:
            self.require(worker)
            before = self._handout.position
            self._handout = self._handout.trained(worker)
            self._trained[worker] += self._handout.position - before
            self._clocks = self._clocks.ticked(worker)
            self._stale[worker] = self._stale[worker].counted(staleness)
            self._ahead = max(self._ahead, self._waited_for(worker).ahead(worker))
            may, position = self._may(worker), self._handout.position
            due = self._look()
        due.give()
        return may, position

    def turn(self, worker: int) -> Turn:
        """Return when the worker may begin its next update."""
        turn: Turn = torch.futures.Future()
        with self._lock:
            self.require(worker)
            self._turns.append((worker, turn))
            due = self._look()
        due.give()
        return turn

    def release(self, worker: int) -> None:
        """Take back what a worker has in hand: it left its loop, and is not waited for."""
        with self._lock:
            self.require(worker)
            self._away.add(worker)
            self._back(worker)
            why = f"worker {worker} left its loop, and is given nothing; begin another to go on"
            due = self._look(self._dropped(worker, why))
        due.give()

    def gone(self, worker: int) -> None:
        """Take back what a worker has in hand, and wait for it no longer. May be told again."""
        with self._lock:
            if worker not in self._live:
                return
            self._live.discard(worker)
            self._back(worker)
            self._clocks = self._clocks.lost(worker)
            due = self._look(self._dropped(worker, taken_for_lost(worker)))
        due.give()

    def present(self) -> tuple[int, ...]:
        """Return the workers that are not lost; one answer for all who ask between two epochs.

        Who asks first is told how it is, and the others the same, until the next epoch begins:
        what all do together is done by the same workers then, also if one is lost meanwhile.
        """
        with self._lock:
            now = tuple(sorted(self._live))
            if not self._handout.done:
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
                "position": self._handout.position,
                "trained": self._split,
            }
            return {**staleness_report(self._stale), **more}

    def _back(self, worker: int) -> None:
        before = self._handout.out
        self._handout = self._handout.lost(worker)
        self._again += before - self._handout.out

    def _dropped(self, worker: int, why: str) -> _Due:
        """Refuse what a worker waits for: it is not to be given anything any more."""
        due, takes, turns = _Due(), self._takes, self._turns
        for take in takes:
            if take.worker == worker:
                due.refuse(take.answer, why)
        for other, turn in turns:
            if other == worker:
                due.refuse(turn, why)
        self._takes = [take for take in takes if take.worker != worker]
        self._turns = [(other, turn) for other, turn in turns if other != worker]
        return due

    def _waited_for(self, worker: int) -> Clocks:
        """Return the clocks of a worker and of those who have something to train."""
        clocks = self._clocks.clocks
        busy = tuple(
            None if other in self._idle | self._away and other != worker else clock
            for other, clock in enumerate(clocks)
        )
        return replace(self._clocks, clocks=busy)

    def _may(self, worker: int) -> bool:
        return self._waited_for(worker).may_begin(worker)

    def _look(self, due: _Due | None = None) -> _Due:
        """Answer whoever can be answered by now, after whoever is noted already."""
        due = due or _Due()
        # Found out again below, since samples of a lost worker may have come back.
        self._idle.clear()
        self._end_epoch(due)
        waiting, self._takes = self._takes, []
        for take in waiting:
            if self._beyond(take) or not self._give(take, due):
                self._takes.append(take)
        still = [(worker, turn) for worker, turn in self._turns if not self._may(worker)]
        kept = {id(turn) for _, turn in still}
        for _, turn in self._turns:
            if id(turn) not in kept:
                due.answer(turn, None)
        self._turns = still
        return due

    def _end_epoch(self, due: _Due) -> None:
        """Tell if the epoch is over, and begin the next when all have asked for it.

        Which is the next is for them to say: they may go back, or leave the rest of one.
        """
        if self._handout.done:
            self._split = tuple(self._trained) if any(self._trained) else ()
            for take in [take for take in self._takes if not self._beyond(take)]:
                self._takes.remove(take)
                self._told.add(take.worker)
                due.answer(take.answer, None)
            for _, turn in self._turns:  # nobody is behind any more
                due.answer(turn, None)
            self._turns = []
        ready = {take.worker for take in self._takes if self._beyond(take)}
        if ready and ready >= self._live:
            self._begin_epoch(self._takes[0])
            if self._handout.done:  # the run has trained all that it is to
                self._end_epoch(due)

    def _begin_epoch(self, first: Take) -> None:
        self._before += self._handout.position
        left = first.end if first.most is None else max(first.most - self._before, 0)
        self._epoch = first.epoch
        self._handout = WorkQueue.of(min(first.end, left), self._workers)
        self._clocks, self._told = self._clocks.aligned(), set()
        self._trained, self._present = [0] * self._workers, None

    def _beyond(self, take: Take) -> bool:
        """Return whether a worker asks for another epoch than the present one."""
        return take.worker in self._told or take.epoch != self._epoch

    def _give(self, take: Take, due: _Due) -> bool:
        if self._handout.done:
            return False
        self._handout, piece = self._handout.give(take.worker, take.samples)
        if piece:
            due.answer(take.answer, [(s.start, s.stop) for s in piece])
        elif self._handout.pieces[take.worker]:
            due.answer(take.answer, LATER)
        else:
            self._idle.add(take.worker)
            return False
        return True
