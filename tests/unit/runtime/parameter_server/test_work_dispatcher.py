"""Whoever asks the office gets samples once, its turn in time, and never waits for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.parameter_server.work_dispatcher import LATER, WorkDispatcher
from tests.messages import raises_message


class Simulated:
    """A worker that asks, trains what it gets, and may prefetch.

    Args:
        office: that it asks.
        number: of it.
        share: samples that it asks for.
        ahead: pieces that it holds besides the one it trains.
    """

    def __init__(self, office: WorkDispatcher, number: int, share: int, ahead: int) -> None:
        self.office, self.number, self.share, self.ahead = office, number, share, ahead
        self.epoch, self.made, self.there = 0, 0, True
        self.hand: list[list[int]] = []
        self.trained: list[Counter[int]] = [Counter()]
        self.asked: Any = None
        self.turn: Any = None
        self.later = False

    def can_move(self) -> bool:
        """Whether it has anything to do but wait."""
        if not self.there:
            return False
        if self.asked is not None:
            return bool(self.asked.done())
        return self.turn is None or bool(self.turn.done())

    def move(self, end: int) -> None:
        """Do the next thing: hear an answer, ask, or train."""
        if self.asked is not None:
            self._hear()
        elif len(self.hand) <= self.ahead and not self.later:
            self.asked = self.office.take(self.number, self.epoch, end, self.share)
        else:
            self._train()

    def _hear(self) -> None:
        answer, self.asked = self.asked.value(), None
        if answer is None:
            assert not self.hand
            self.epoch += 1
            self.trained.append(Counter())
        elif answer == LATER:
            assert self.hand
            self.later = True
        else:
            self.hand.append([i for start, stop in answer for i in range(start, stop)])

    def _train(self) -> None:
        self.trained[-1].update(self.hand.pop(0))
        self.later = self.later and bool(self.hand)
        may, _ = self.office.made(self.number, 0)
        self.made += 1
        self.turn = None if may else self.office.turn(self.number)


@given(data=st.data())
def test_each_sample_is_trained_once_in_each_epoch_and_nobody_waits_for_ever(
    data: st.DataObject,
) -> None:
    shares = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bound = data.draw(st.sampled_from([None, 0, 1, 3]))
    end, epochs = data.draw(st.integers(1, 30)), 2
    office = WorkDispatcher(len(shares), bound)
    workers = [
        Simulated(office, number, share, data.draw(st.integers(0, 2)))
        for number, share in enumerate(shares)
    ]
    trained = [Counter[int]() for _ in range(epochs)]
    dies = data.draw(st.none() | st.integers(0, 40)) if len(shares) > 1 else None
    for moment in range(2000):
        if moment == dies:
            workers[0].there = False
            office.gone(0)
            office.gone(0)
        ready = [w for w in workers if w.can_move() and w.epoch < epochs]
        if not ready:
            break
        data.draw(st.sampled_from(ready)).move(end)
    assert all(w.epoch == epochs for w in workers if w.there), "all came to the end"
    for worker in workers:
        for epoch, seen in enumerate(worker.trained[:epochs]):
            trained[epoch].update(seen)
    assert trained == [Counter(range(end))] * epochs
    report = office.report()
    assert report["count"] == sum(worker.made for worker in workers)
    assert bound is None or report["most_ahead"] <= bound + 1


def test_who_left_its_loop_gives_back_what_it_has() -> None:
    office = WorkDispatcher(2, None)
    first, second = office.take(0, 0, 10, 8), office.take(1, 0, 10, 1)
    assert first.value() == [(0, 8)]
    assert second.value() == [(8, 9)]

    office.release(0)
    office.made(1, 0)

    assert office.take(1, 0, 10, 10).value() == [(0, 8), (9, 10)]
    assert office.report()["handed_out_again"] == 8


def test_an_epoch_begins_when_all_are_there() -> None:
    office = WorkDispatcher(2, None)

    early = office.take(0, 3, 4, 4)
    assert not early.done()
    office.take(1, 3, 4, 4)

    assert early.value() == [(0, 4)]


def test_who_has_nothing_is_told_when_the_epoch_is_over_not_before() -> None:
    office = WorkDispatcher(2, None)
    office.take(0, 0, 4, 4)
    idle = office.take(1, 0, 4, 4)
    assert not idle.done()

    office.made(0, 0)

    assert idle.value() is None
    assert office.take(0, 0, 4, 4).value() is None


def test_nobody_waits_for_one_that_has_nothing_to_train() -> None:
    office = WorkDispatcher(2, 0)
    office.take(0, 0, 4, 2)
    idle = office.take(1, 0, 4, 0)
    assert not idle.done()

    assert office.made(0, 0) == (True, 2)


def test_whoever_is_too_far_ahead_waits_for_its_turn() -> None:
    office = WorkDispatcher(2, 1)
    for worker in (0, 1):
        office.take(worker, 0, 20, 2)
    assert office.made(0, 0) == (True, 2)
    office.take(0, 0, 20, 2)

    may, _ = office.made(0, 0)
    turn = office.turn(0)

    assert not may
    assert not turn.done()
    office.made(1, 0)
    assert turn.done()


def test_the_update_of_one_that_was_taken_for_lost_is_refused() -> None:
    office = WorkDispatcher(2, None)
    office.require(1)
    office.gone(1)
    office.require(0)
    with raises_message(RuntimeError):
        office.require(1)
    with raises_message(RuntimeError):
        office.take(1, 0, 4, 4)
    with raises_message(RuntimeError):
        office.turn(1)
    with raises_message(RuntimeError):
        office.release(1)
    assert office.take(0, 0, 4, 4).value() == [(0, 4)]


def test_who_waits_and_is_taken_for_lost_is_told() -> None:
    office = WorkDispatcher(2, 0)
    office.take(0, 0, 8, 4)
    office.take(1, 0, 8, 4)
    assert office.made(0, 0) == (False, 4)
    turn, idle = office.turn(0), office.take(0, 0, 8, 4)

    office.gone(0)

    for waiting in (turn, idle):
        with raises_message(RuntimeError, "worker 0"):
            waiting.value()
    with raises_message(RuntimeError):
        office.made(0, 0)


def test_who_has_left_its_loop_is_given_nothing_that_it_asked_for_before() -> None:
    office = WorkDispatcher(2, None)
    office.take(0, 0, 4, 2)
    office.take(1, 0, 4, 2)
    office.made(0, 0)
    asked = office.take(0, 0, 4, 2)

    office.release(0)
    office.release(1)

    with raises_message(RuntimeError):
        asked.value()
    assert office.take(1, 0, 4, 2).value() == [(2, 4)], "nobody else has it in hand"


def test_the_split_of_an_epoch_is_what_each_worker_trained_in_it() -> None:
    office = WorkDispatcher(2, None)
    assert office.report()["trained"] == ()

    for epoch, split in enumerate([(3, 1), (1, 3)]):
        for worker in (0, 1):
            office.take(worker, epoch, 4, split[worker])
        for worker in (0, 1):
            assert office.report()["trained"] == ((3, 1) if epoch else ())
            office.made(worker, 0)
        for worker in (0, 1):
            assert office.take(worker, epoch, 4, 1).value() is None
        assert office.report()["trained"] == split
        assert office.report()["position"] == 4


def test_all_that_ask_between_two_epochs_hear_of_the_same_workers() -> None:
    office = WorkDispatcher(3, None)
    for worker in (0, 1, 2):
        office.take(worker, 0, 3, 1)
    office.gone(2)
    assert office.present() == (0, 1)
    last = [office.made(0, 0), office.take(0, 0, 3, 1), office.made(0, 0), office.made(1, 0)]
    assert last[-1] == (True, 3)

    assert office.present() == (0, 1)
    office.gone(1)
    assert office.present() == (0, 1)

    office.take(0, 1, 3, 1)
    assert office.present() == (0,)


def test_all_may_leave_the_rest_of_an_epoch_and_go_back_to_an_earlier_one() -> None:
    office = WorkDispatcher(2, None)
    for worker in (0, 1):
        office.take(worker, 0, 20, 2)
    for worker in (0, 1):
        office.release(worker)

    first, second = (office.take(worker, 1, 20, 2) for worker in (0, 1))
    assert [first.value(), second.value()] == [[(0, 2)], [(2, 4)]]
    for worker in (0, 1):
        office.release(worker)

    back = [office.take(worker, 0, 4, 2) for worker in (0, 1)]
    assert [each.value() for each in back] == [[(0, 2)], [(2, 4)]]


def test_an_epoch_may_come_again() -> None:
    office = WorkDispatcher(1, None)
    for _ in range(2):
        assert office.take(0, 5, 3, 3).value() == [(0, 3)]
        office.made(0, 0)
        assert office.take(0, 5, 3, 3).value() is None


def test_nobody_waits_for_one_that_has_left_its_loop() -> None:
    office = WorkDispatcher(2, 0)
    for worker in (0, 1):
        office.take(worker, 0, 20, 2)
    may, _ = office.made(0, 0)
    turn = office.turn(0)
    assert not may
    assert not turn.done()

    office.release(1)

    assert turn.done()


def test_a_limit_of_samples_ends_the_run_for_all_alike() -> None:
    office = WorkDispatcher(2, None)
    first = [office.take(worker, 0, 6, 3, 8) for worker in (0, 1)]
    assert [one.value() for one in first] == [[(0, 3)], [(3, 6)]]
    for worker in (0, 1):
        office.made(worker, 0)
    assert [office.take(worker, 0, 6, 3, 8).value() for worker in (0, 1)] == [None, None]

    second = [office.take(worker, 1, 6, 2, 8) for worker in (0, 1)]
    assert second[0].value() == [(0, 2)]
    assert not second[1].done()
    office.made(0, 0)
    assert second[1].value() is None
    assert office.take(0, 1, 6, 2, 8).value() is None

    assert office.report()["position"] == 2

    for epoch in (2, 3):
        rest = [office.take(worker, epoch, 6, 2, 8) for worker in (0, 1)]
        assert [one.value() for one in rest] == [None, None]
    assert (office.report()["position"], office.report()["trained"]) == (0, ())


def test_nobody_waits_for_one_that_asks_for_the_next_epoch_already() -> None:
    office = WorkDispatcher(2, 0)
    for worker in (0, 1):
        office.take(worker, 0, 20, 2)
    office.release(0)
    early = office.take(0, 1, 20, 2)

    assert office.made(1, 0) == (True, 2)
    assert not early.done()
