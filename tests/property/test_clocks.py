"""In whatever order workers ask, none gets further ahead than allowed, and never do all wait."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from evenstride.core.sync_modes.async_schedule import Clocks, Staleness, staleness_report
from tests.messages import raises_message

WORKERS = st.integers(0, 4)


class Schedule(RuleBasedStateMachine):
    """Workers that pull, take any time and push, as far as the clocks let them."""

    @initialize(workers=st.integers(1, 5), staleness=st.none() | st.integers(0, 3))
    def begin(self, workers: int, staleness: int | None) -> None:
        self.workers, self.bound = workers, staleness
        self.clocks = Clocks.of(workers, staleness)
        self.made = dict.fromkeys(range(workers), 0)
        self.pulled = dict[int, int]()
        self.version = 0

    def there(self, worker: int) -> int:
        return sorted(self.made)[worker % len(self.made)]

    def ask(self, worker: int) -> None:
        if self.clocks.may_begin(worker):
            self.pulled[worker] = self.version
            if self.bound is not None:
                assert self.made[worker] - min(self.made.values()) <= self.bound

    def push(self, worker: int) -> None:
        staleness = self.version - self.pulled.pop(worker)
        self.clocks = self.clocks.ticked(worker)
        self.made[worker] += 1
        self.version += 1
        assert staleness >= 0
        if self.bound is not None:
            assert staleness <= (self.workers - 1) * (2 * self.bound + 1)

    @rule(worker=WORKERS, steps=st.integers(1, 9))
    def one_goes_on_as_far_as_it_may(self, worker: int, steps: int) -> None:
        worker = self.there(worker)
        for _ in range(steps):
            if worker in self.pulled:
                self.push(worker)
            self.ask(worker)

    @rule(worker=WORKERS)
    def one_begins(self, worker: int) -> None:
        worker = self.there(worker)
        if worker not in self.pulled:
            self.ask(worker)

    @rule(worker=WORKERS)
    def one_ends(self, worker: int) -> None:
        worker = self.there(worker)
        if worker in self.pulled:
            self.push(worker)

    @precondition(lambda self: len(self.made) > 1)
    @rule(worker=WORKERS)
    def one_is_lost(self, worker: int) -> None:
        worker = self.there(worker)
        self.clocks = self.clocks.lost(worker)
        del self.made[worker]
        self.pulled.pop(worker, None)
        for call in (self.clocks.may_begin, self.clocks.ticked, self.clocks.lost):
            with pytest.raises(ValueError, match=f"worker {worker} has no clock: it is lost"):
                call(worker)

    @rule()
    def all_meet(self) -> None:
        for worker in sorted(self.pulled):
            self.push(worker)
        self.clocks = self.clocks.aligned()
        self.made = dict.fromkeys(self.made, max(self.made.values()))
        assert all(
            self.clocks.may_begin(worker) and not self.clocks.ahead(worker) for worker in self.made
        )

    @invariant()
    def clocks_are_what_was_made(self) -> None:
        slowest = min(self.made.values())
        assert self.clocks.slowest == slowest
        for worker, made in self.made.items():
            assert self.clocks.ahead(worker) == made - slowest

    @invariant()
    def no_worker_is_further_ahead_than_one_more_than_the_bound(self) -> None:
        if self.bound is not None:
            assert max(self.made.values()) - min(self.made.values()) <= self.bound + 1
            for worker in self.pulled:
                assert self.clocks.ahead(worker) <= self.bound

    @invariant()
    def the_slowest_may_begin(self) -> None:
        slowest = min(self.made, key=lambda worker: self.made[worker])
        assert self.clocks.may_begin(slowest)
        if self.bound is None:
            assert all(map(self.clocks.may_begin, self.made))


TestSchedule = Schedule.TestCase


@given(st.integers(0, 5), st.integers(1, 5))
def test_the_bounds_are_reached(bound: int, others: int) -> None:
    """A worker that pulls when all are behind it, and pushes when all are ahead of it."""
    clocks, version = Clocks.of(others + 1, bound), 0
    for _ in range(bound):
        assert clocks.may_begin(0)
        clocks = clocks.ticked(0)
    assert clocks.ahead(0) == bound
    assert clocks.may_begin(0)
    while any(clocks.may_begin(worker) for worker in range(1, others + 1)):
        for worker in filter(clocks.may_begin, range(1, others + 1)):
            clocks, version = clocks.ticked(worker), version + 1

    assert version == others * (2 * bound + 1)
    assert [clocks.ahead(worker) for worker in range(others + 1)] == [0] + [bound + 1] * others


def test_without_a_bound_no_worker_waits() -> None:
    clocks = Clocks.of(2, None)
    for _ in range(1000):
        clocks = clocks.ticked(0)

    assert clocks.may_begin(0)
    assert clocks.ahead(0) == 1000


def test_a_worker_that_waited_for_a_lost_one_continues() -> None:
    clocks = Clocks.of(3, 0).ticked(0).ticked(1)
    assert not clocks.may_begin(0)
    assert clocks.slowest == 0

    clocks = clocks.lost(2)
    assert clocks.may_begin(0)
    assert clocks.slowest == 1


def test_when_all_are_lost_nothing_is_slowest() -> None:
    clocks = Clocks.of(1, 2).ticked(0).lost(0)

    assert clocks.slowest == 0
    assert clocks.aligned() == clocks
    with raises_message(ValueError, "worker 0"):
        clocks.ahead(0)


@pytest.mark.parametrize("worker", [-1, 2])
def test_an_unknown_worker_is_refused(worker: int) -> None:
    with raises_message(ValueError, worker):
        Clocks.of(2, 1).ticked(worker)


@pytest.mark.parametrize(("workers", "staleness"), [(0, 1), (2, -1)])
def test_clocks_that_cannot_be_are_refused(workers: int, staleness: int) -> None:
    with raises_message(ValueError, workers, staleness):
        Clocks.of(workers, staleness)


STALENESS = st.lists(st.integers(0, 40))


def counted(values: list[int]) -> Staleness:
    statistics = Staleness()
    for value in values:
        statistics = statistics.counted(value)
    return statistics


@given(STALENESS)
def test_statistics_are_those_of_the_list(values: list[int]) -> None:
    report = json.loads(json.dumps(counted(values).to_dict()))

    assert report == {
        "count": len(values),
        "mean": sum(values) / len(values) if values else 0.0,
        "maximum": max(values, default=0),
        "histogram": [*(values.count(n) for n in range(16)), sum(n > 15 for n in values)],
    }


@given(st.lists(STALENESS, max_size=4))
def test_a_report_has_all_together_and_each_worker(workers: list[list[int]]) -> None:
    report = staleness_report([counted(values) for values in workers])

    assert report.pop("workers") == [counted(values).to_dict() for values in workers]
    assert report == counted([value for values in workers for value in values]).to_dict()


def test_an_update_cannot_be_older_than_new() -> None:
    with raises_message(ValueError, "-1"):
        Staleness().counted(-1)
