"""Whatever workers at their own pace do, the schedule agrees with sets and counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evenstride.core.sync_modes.async_schedule import AsyncSchedule, Piece

WORKERS = st.integers(0, 3)


def positions(piece: Piece) -> list[int]:
    return [position for stretch in piece for position in stretch]


class Workers(RuleBasedStateMachine):
    """The schedule next to lists of positions and a counter of updates for each worker."""

    @initialize(workers=st.integers(1, 4), bound=st.none() | st.integers(0, 2))
    def start(self, workers: int, bound: int | None) -> None:
        self.schedule = AsyncSchedule.of(workers, bound)
        self.bound, self.size = bound, 0
        self.clocks: list[int | None] = [0] * workers
        self.hands: list[list[list[int]]] = [[] for _ in range(workers)]
        self.open, self.trained = set[int](), list[int]()
        self.idle = set[int]()

    @rule(samples=st.integers(0, 40))
    def an_epoch_begins(self, samples: int) -> None:
        if any(self.hands):
            return
        self.schedule = self.schedule.opened(samples)
        fastest = max((c for c in self.clocks if c is not None), default=0)
        self.clocks = [None if c is None else fastest for c in self.clocks]
        self.size, self.open, self.trained = samples, set(range(samples)), []
        self.idle = set()

    @rule(worker=WORKERS, samples=st.integers(0, 9))
    def one_asks(self, worker: int, samples: int) -> None:
        worker %= len(self.clocks)
        if self.clocks[worker] is None:
            return
        self.schedule, piece = self.schedule.given(worker, samples)
        mine = sorted(self.open)[:samples]
        assert positions(piece) == mine
        self.open -= set(mine)
        self.hands[worker] += [mine] if mine else []
        (self.idle.discard if self.hands[worker] else self.idle.add)(worker)

    @rule(worker=WORKERS)
    def one_has_made_an_update(self, worker: int) -> None:
        worker %= len(self.clocks)
        if self.hands[worker]:
            self.schedule = self.schedule.made(worker)
            self.trained += self.hands[worker].pop(0)
            clock = self.clocks[worker]
            self.clocks[worker] = None if clock is None else clock + 1

    @rule(worker=WORKERS)
    def one_leaves_its_loop(self, worker: int) -> None:
        worker %= len(self.clocks)
        self.schedule = self.schedule.returned(worker)
        self.put_back(worker)

    @rule(worker=WORKERS)
    def one_is_lost(self, worker: int) -> None:
        worker %= len(self.clocks)
        if self.clocks[worker] is None:
            with pytest.raises(ValueError, match=f"worker {worker} has no clock"):
                self.schedule.lost(worker)
            return
        self.schedule = self.schedule.lost(worker)
        self.put_back(worker)
        self.clocks[worker] = None

    @rule(counted=st.lists(st.booleans(), min_size=4, max_size=4))
    def others_are_counted(self, counted: list[bool]) -> None:
        counted = counted[: len(self.clocks)]
        self.schedule = self.schedule.counting(counted)
        pairs = list(zip(self.clocks, counted, strict=True))
        slowest = min((c for c, here in pairs if here and c is not None), default=0)
        self.clocks = [(slowest if c is None else c) if here else None for c, here in pairs]
        self.idle = set()

    def put_back(self, worker: int) -> None:
        self.open.update(*self.hands[worker])
        self.hands[worker] = []
        self.idle.add(worker)

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        held = [p for hand in self.hands for piece in hand for p in piece]
        assert sorted([*self.open, *held, *self.trained]) == list(range(self.size))
        assert self.schedule.queue.done == (len(self.trained) == self.size)

    @invariant()
    def a_worker_may_begin_within_the_bound_of_those_that_are_waited_for(self) -> None:
        for worker, clock in enumerate(self.clocks):
            if clock is None:
                assert not self.schedule.may_begin(worker)
                continue
            others = (c for k, c in enumerate(self.clocks) if c is not None and k not in self.idle)
            ahead = clock - min([clock, *others])
            assert self.schedule.ahead(worker) == ahead
            assert self.schedule.may_begin(worker) == (self.bound is None or ahead <= self.bound)

    @invariant()
    def never_do_all_wait_that_have_something_to_train(self) -> None:
        busy = [k for k, hand in enumerate(self.hands) if hand and self.clocks[k] is not None]
        others = [
            k for k, c in enumerate(self.clocks) if c is not None and k not in {*busy, *self.idle}
        ]
        assert not busy or any(map(self.schedule.may_begin, [*busy, *others]))


TestWorkers = Workers.TestCase


@given(st.integers(0, 3), st.integers(1, 30))
def test_workers_waiting_for_one_that_is_lost_go_on(bound: int, updates: int) -> None:
    schedule = AsyncSchedule.of(2, bound).opened(updates + bound + 2)
    schedule, _ = schedule.given(1, 1)
    made = 0
    while schedule.may_begin(0):
        schedule, _ = schedule.given(0, 1)
        schedule = schedule.made(0)
        made += 1

    assert made == bound + 1
    assert schedule.lost(1).may_begin(0)
    assert schedule.lost(1).given(0, 1)[1] == (range(1),)
