"""Property: the samples trained in an epoch are each sample once, through any history.

A history is a random sequence of re-splits, prefetching, steps, loops left early, and restarts
from a saved state at another number of workers. The samplers, gates and positions are the real
ones; only training and the wires between the ranks are left out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import Shares
from evenstride.core.sampling.draw import Draw
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition, EpochOrder
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loading.seeding import Keys

BATCH = 12


@dataclass
class Rank:
    """One rank's real gate, sampler and position, and a loader that prefetches."""

    gate: DrawBarrier
    progress: CommittedPosition
    sampler: StepSampler
    prefetch: int
    source: Iterator[Keys] = field(default_factory=lambda: iter(()))
    ready: deque[Keys] = field(default_factory=deque)

    def begin(self) -> None:
        """Enter a loop over the loader."""
        progress = self.progress
        progress.begin_pass()
        self.sampler.begin(progress.epoch, progress.cursor, progress.step, None)
        self.source, self.ready = iter(self.sampler), deque()

    def fetch_step(self) -> list[tuple[Keys, Draw]]:
        """Return the micro-batches of the next step; empty at the end of the epoch."""
        step: list[tuple[Keys, Draw]] = []
        while not step or not step[-1][1].last:
            while len(self.ready) <= self.prefetch and (keys := next(self.source, None)):
                self.ready.append(keys)
            if not self.ready:
                return []
            step.append((self.ready.popleft(), self.sampler.delivered()[0]))
        return step


@dataclass
class Job:
    """A run of some number of workers, all in this process, in lockstep."""

    length: int
    ranks: list[Rank]

    @classmethod
    def start(cls, length: int, workers: int, prefetch: list[int], saved: object) -> Job:
        """Start with equal shares, from a saved state if there is one."""
        shares = tuple(BATCH // workers + (k < BATCH % workers) for k in range(workers))
        ranks = []
        for rank in range(workers):
            gate, progress = DrawBarrier(shares), CommittedPosition(0, BATCH)
            if saved is not None:
                progress.load(saved)  # type: ignore[arg-type]
            order = EpochOrder(length, 0)
            progress.attach(order)
            fits = [
                MicroBatchLimits(),
                MicroBatchLimits(3),
                MicroBatchLimits(5, guarded=True),
                MicroBatchLimits(9, learned=2),
                MicroBatchLimits(guarded=True),
            ]
            fit = fits[(rank + prefetch[rank]) % len(fits)]
            ranks.append(Rank(gate, progress, StepSampler(order, gate, rank, fit), prefetch[rank]))
        job = cls(length, ranks)
        job.enter()
        return job

    def enter(self) -> None:
        """Let every rank enter its loop."""
        for rank in self.ranks:
            rank.begin()

    def split(self, weights: list[int]) -> None:
        """Put new shares in force, as an exchange would: from the highest barrier on."""
        shares = _shares(weights, len(self.ranks))
        held = [rank.gate.hold() for rank in self.ranks]
        effective = max(h.barrier for h in held if h is not None)
        for rank in self.ranks:
            rank.gate.decide(effective, shares, opening=False)

    def step(self, trained: Counter[tuple[int, int]]) -> None:
        """Train one step and commit it, or roll over to the next epoch."""
        fetched = [rank.fetch_step() for rank in self.ranks]
        assert len({bool(step) for step in fetched}) == 1, "ranks end an epoch together"
        epochs = {rank.progress.epoch for rank in self.ranks}
        assert len(epochs) == 1
        if not fetched[0]:
            self.leave()
            self.enter()
            return
        numbers = {draw.step for step in fetched for _, draw in step}
        windows = {draw.window for step in fetched for _, draw in step}
        assert len(numbers) == len(windows) == 1, "ranks train the same step"
        count = 0
        for step in fetched:
            for keys, draw in step:
                if draw.samples:
                    assert len(keys) == draw.samples
                    trained.update((min(epochs), key[0]) for key in keys)  # type: ignore[index]
                    count += draw.samples
        assert count == windows.pop(), "the shares sum to the window"
        for rank in self.ranks:
            rank.progress.commit(fetched[0][0][1].window)

    def leave(self) -> None:
        """Leave the loops; what was prefetched is forgotten."""
        for rank in self.ranks:
            rank.progress.end_pass()


def _shares(weights: list[int], workers: int) -> Shares:
    weights = [*weights, *([1] * workers)][:workers]
    cuts = [BATCH * sum(weights[: k + 1]) // max(sum(weights), 1) for k in range(workers)]
    cuts[-1] = BATCH
    return tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))


actions = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("split"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("break"), st.just(None)),
    st.tuples(st.just("restart"), st.integers(1, 4)),
)


@given(
    length=st.integers(1, 130),
    workers=st.integers(1, 4),
    prefetch=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    history=st.lists(actions, min_size=1, max_size=25),
)
def test_every_epoch_is_each_sample_once_through_any_history(
    length: int, workers: int, prefetch: list[int], history: list[tuple[str, object]]
) -> None:
    trained: Counter[tuple[int, int]] = Counter()
    job = Job.start(length, workers, prefetch, None)

    for what, value in history:
        match what:
            case "step":
                for _ in range(value):  # type: ignore[call-overload]
                    job.step(trained)
            case "split":
                job.split(value)  # type: ignore[arg-type]
            case "break":
                job.leave()
                job.enter()
            case "restart":
                saved = job.ranks[0].progress.save()
                job = Job.start(length, value, prefetch, saved)  # type: ignore[arg-type]

    progress = job.ranks[0].progress
    complete = {(epoch, index) for epoch in range(progress.epoch) for index in range(length)}
    assert set(trained.values()) <= {1}, "no sample twice in one epoch"
    assert complete <= trained.keys(), "no sample lost from an epoch that is over"
    assert len(trained) == length * progress.epoch + progress.position


@given(
    length=st.integers(1, 130),
    one=st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    other=st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    prefetch=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_the_sets_of_samples_do_not_depend_on_workers_split_or_prefetch(
    length: int,
    one: tuple[int, list[int]],
    other: tuple[int, list[int]],
    prefetch: list[int],
) -> None:
    runs = []
    for (workers, weights), depths in ((one, prefetch), (other, prefetch[::-1])):
        job = Job.start(length, workers, depths, None)
        sets = []
        for number in range(8):
            trained: Counter[tuple[int, int]] = Counter()
            job.step(trained)
            sets.append(trained)
            if number == 3:
                job.split(weights)
        runs.append(sets)

    assert runs[0] == runs[1]
