"""Property: each sample of a stream once per epoch, through any history and any number of readers.

The histories are those of `test_exactly_once`. Each rank has several loader processes, which read
the same stream one after the other. No reader knows its length, which changes from epoch to epoch.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sampling.draw import Draw
from evenstride.core.sampling.partition import UNKNOWN_LENGTH
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition, EpochOrder
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loading.seeding import Keys
from evenstride.runtime.loading.streams import Stream, StreamReader
from tests.property.test_exactly_once import BATCH, Job, Rank, actions


def length_of(first: int, epoch: int) -> int:
    """Return the samples of an epoch: sometimes more, sometimes fewer than of the one before."""
    return max(first + (-3, 9, 5)[epoch % 3], 1)


def read(first: int, epoch: int, skip: int) -> range:
    """Return the rest of an epoch."""
    return range(skip, length_of(first, epoch))


@dataclass
class StreamRank(Rank):
    """A rank whose loader processes read a stream."""

    reader: Any = None
    processes: int = 1
    lanes: list[StreamReader] = field(default_factory=list)
    fetched: int = 0

    def begin(self) -> None:
        super().begin()
        self.reader.release()  # as before loader processes are forked
        self.lanes, self.fetched = [copy.copy(self.reader) for _ in range(self.processes)], 0

    def fetch_step(self) -> list[tuple[Keys, Draw]]:
        step: list[tuple[Any, Draw]] = []
        while not step or not step[-1][1].last:
            while len(self.ready) <= self.prefetch and (keys := next(self.source, None)):
                self.ready.append(keys)
            if not self.ready:
                return []
            lane = self.lanes[self.fetched % len(self.lanes)]
            part = lane.__getitems__(self.ready.popleft())  # type: ignore[arg-type]
            self.fetched += 1
            if part.rest is not None:
                self._end(part.rest)
            else:
                step.append(([(sample,) for sample in part.data], self.sampler.delivered()[0]))
        return step

    def _end(self, rest: list[Any]) -> None:
        """Go on as the loader does at the end of a stream."""
        progress, sampler = self.progress, self.sampler
        self.reader.hold(progress.epoch, progress.position, rest)
        progress.found_end(progress.position + len(rest))
        sampler.begin(progress.epoch, progress.cursor, progress.step, None)
        self.source, self.lanes = iter(sampler), [self.reader]
        self.ready.clear()


@dataclass
class StreamJob(Job):
    """A run on a stream, which each rank reads by itself."""

    @classmethod
    def start(cls, length: int, workers: int, prefetch: list[int], saved: object) -> StreamJob:
        shares = tuple(BATCH // workers + (k < BATCH % workers) for k in range(workers))
        ranks: list[Rank] = []
        for rank in range(workers):
            gate, progress = DrawBarrier(shares), CommittedPosition(0, BATCH)
            if saved is not None:
                progress.load(saved)  # type: ignore[arg-type]
            order = EpochOrder(UNKNOWN_LENGTH, 0, windows="stream", unlimited=True)
            progress.attach(order)
            fit = [MicroBatchLimits(), MicroBatchLimits(3), MicroBatchLimits(9, learned=2)][
                rank % 3
            ]
            sampler = StepSampler(order, gate, rank, fit)
            reader = StreamReader(Stream(partial(read, length)), 0, seeded=True)
            depth = prefetch[rank]
            ranks.append(
                StreamRank(gate, progress, sampler, depth, reader=reader, processes=1 + depth % 3)
            )
        job = cls(length, ranks)
        job.enter()
        return job


@given(
    length=st.integers(1, 130),
    workers=st.integers(1, 4),
    prefetch=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    history=st.lists(actions, min_size=1, max_size=25),
)
def test_every_epoch_is_the_whole_stream_once_through_any_history(
    length: int, workers: int, prefetch: list[int], history: list[tuple[str, Any]]
) -> None:
    trained: Counter[tuple[int, int]] = Counter()
    job: Job = StreamJob.start(length, workers, prefetch, None)

    for what, value in history:
        match what:
            case "step":
                for _ in range(value):
                    job.step(trained)
            case "split":
                job.split(value)
            case "break":
                job.leave()
                job.enter()
            case "restart":
                job = StreamJob.start(length, value, prefetch, job.ranks[0].progress.save())

    progress = job.ranks[0].progress
    complete = {(e, i) for e in range(progress.epoch) for i in range(length_of(length, e))}
    now = {(progress.epoch, index) for index in range(progress.position)}
    assert set(trained.values()) <= {1}, "no sample twice in one epoch"
    assert trained.keys() == complete | now, "in the order of the stream, without a gap"
