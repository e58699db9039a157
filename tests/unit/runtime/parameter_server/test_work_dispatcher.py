"""Workers get each sample once and their turn in time, and no worker waits forever."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.parameter_server.work_dispatcher import LATER, WorkDispatcher
from tests.messages import raises_message


class Simulated:
    """A worker that requests samples, trains them, and may prefetch.

    Args:
        dispatcher: the dispatcher that it asks.
        number: its number.
        share: the number of samples that it requests.
        ahead: the number of requests that it prefetches.
    """

    def __init__(self, dispatcher: WorkDispatcher, number: int, share: int, ahead: int) -> None:
        self.dispatcher, self.number, self.share, self.ahead = dispatcher, number, share, ahead
        self.epoch, self.made, self.there = 0, 0, True
        self.hand: list[list[int]] = []
        self.trained: list[Counter[int]] = [Counter()]
        self.asked: Any = None
        self.turn: Any = None
        self.later = False

    def can_move(self) -> bool:
        """Whether it can do more than wait."""
        if not self.there:
            return False
        if self.asked is not None:
            return bool(self.asked.done())
        return self.turn is None or bool(self.turn.done())

    def move(self, end: int) -> None:
        """Make the next action: take an answer, send a request, or train."""
        if self.asked is not None:
            self._hear()
        elif len(self.hand) <= self.ahead and not self.later:
            self.asked = self.dispatcher.take(self.number, self.epoch, end, self.share)
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
        may, _ = self.dispatcher.made(self.number, 0)
        self.made += 1
        self.turn = None if may else self.dispatcher.turn(self.number)


@given(data=st.data())
def test_each_sample_is_trained_once_per_epoch_and_no_worker_waits_forever(
    data: st.DataObject,
) -> None:
    shares = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bound = data.draw(st.sampled_from([None, 0, 1, 3]))
    end, epochs = data.draw(st.integers(1, 30)), 2
    dispatcher = WorkDispatcher(len(shares), bound)
    workers = [
        Simulated(dispatcher, number, share, data.draw(st.integers(0, 2)))
        for number, share in enumerate(shares)
    ]
    trained = [Counter[int]() for _ in range(epochs)]
    dies = data.draw(st.none() | st.integers(0, 40)) if len(shares) > 1 else None
    for moment in range(2000):
        if moment == dies:
            workers[0].there = False
            dispatcher.gone(0)
            dispatcher.gone(0)
        ready = [w for w in workers if w.can_move() and w.epoch < epochs]
        if not ready:
            break
        data.draw(st.sampled_from(ready)).move(end)
    assert all(w.epoch == epochs for w in workers if w.there), "all came to the end"
    for worker in workers:
        for epoch, seen in enumerate(worker.trained[:epochs]):
            trained[epoch].update(seen)
    assert trained == [Counter(range(end))] * epochs
    report = dispatcher.report()
    assert report["count"] == sum(worker.made for worker in workers)
    assert bound is None or report["most_ahead"] <= bound + 1


def test_a_worker_that_stops_early_returns_its_samples() -> None:
    dispatcher = WorkDispatcher(2, None)
    first, second = dispatcher.take(0, 0, 10, 8), dispatcher.take(1, 0, 10, 1)
    assert first.value() == [(0, 8)]
    assert second.value() == [(8, 9)]

    dispatcher.release(0)
    dispatcher.made(1, 0)

    assert dispatcher.take(1, 0, 10, 10).value() == [(0, 8), (9, 10)]
    assert dispatcher.report()["handed_out_again"] == 8


def test_an_epoch_begins_when_all_workers_have_asked() -> None:
    dispatcher = WorkDispatcher(2, None)

    early = dispatcher.take(0, 3, 4, 4)
    assert not early.done()
    dispatcher.take(1, 3, 4, 4)

    assert early.value() == [(0, 4)]


def test_an_idle_worker_gets_its_answer_at_the_end_of_the_epoch() -> None:
    dispatcher = WorkDispatcher(2, None)
    dispatcher.take(0, 0, 4, 4)
    idle = dispatcher.take(1, 0, 4, 4)
    assert not idle.done()

    dispatcher.made(0, 0)

    assert idle.value() is None
    assert dispatcher.take(0, 0, 4, 4).value() is None


def test_no_worker_waits_for_an_idle_one() -> None:
    dispatcher = WorkDispatcher(2, 0)
    dispatcher.take(0, 0, 4, 2)
    idle = dispatcher.take(1, 0, 4, 0)
    assert not idle.done()

    assert dispatcher.made(0, 0) == (True, 2)


def test_a_worker_that_is_too_far_ahead_waits() -> None:
    dispatcher = WorkDispatcher(2, 1)
    for worker in (0, 1):
        dispatcher.take(worker, 0, 20, 2)
    assert dispatcher.made(0, 0) == (True, 2)
    dispatcher.take(0, 0, 20, 2)

    may, _ = dispatcher.made(0, 0)
    turn = dispatcher.turn(0)

    assert not may
    assert not turn.done()
    dispatcher.made(1, 0)
    assert turn.done()


def test_the_update_of_a_lost_worker_is_refused() -> None:
    dispatcher = WorkDispatcher(2, None)
    dispatcher.require(1)
    dispatcher.gone(1)
    dispatcher.require(0)
    with raises_message(RuntimeError):
        dispatcher.require(1)
    with raises_message(RuntimeError):
        dispatcher.take(1, 0, 4, 4)
    with raises_message(RuntimeError):
        dispatcher.turn(1)
    with raises_message(RuntimeError):
        dispatcher.release(1)
    assert dispatcher.take(0, 0, 4, 4).value() == [(0, 4)]


def test_a_waiting_worker_that_is_declared_lost_gets_an_error() -> None:
    dispatcher = WorkDispatcher(2, 0)
    dispatcher.take(0, 0, 8, 4)
    dispatcher.take(1, 0, 8, 4)
    assert dispatcher.made(0, 0) == (False, 4)
    turn, idle = dispatcher.turn(0), dispatcher.take(0, 0, 8, 4)

    dispatcher.gone(0)

    for waiting in (turn, idle):
        with raises_message(RuntimeError, "worker 0"):
            waiting.value()
    with raises_message(RuntimeError):
        dispatcher.made(0, 0)


def test_pending_requests_of_a_worker_that_stops_early_are_refused() -> None:
    dispatcher = WorkDispatcher(2, None)
    dispatcher.take(0, 0, 4, 2)
    dispatcher.take(1, 0, 4, 2)
    dispatcher.made(0, 0)
    asked = dispatcher.take(0, 0, 4, 2)

    dispatcher.release(0)
    dispatcher.release(1)

    with raises_message(RuntimeError):
        asked.value()
    assert dispatcher.take(1, 0, 4, 2).value() == [(2, 4)], "no other worker holds it"


def test_the_split_of_an_epoch_is_what_each_worker_trained_in_it() -> None:
    dispatcher = WorkDispatcher(2, None)
    assert dispatcher.report()["trained"] == ()

    for epoch, split in enumerate([(3, 1), (1, 3)]):
        for worker in (0, 1):
            dispatcher.take(worker, epoch, 4, split[worker])
        for worker in (0, 1):
            assert dispatcher.report()["trained"] == ((3, 1) if epoch else ())
            dispatcher.made(worker, 0)
        for worker in (0, 1):
            assert dispatcher.take(worker, epoch, 4, 1).value() is None
        assert dispatcher.report()["trained"] == split
        assert dispatcher.report()["position"] == 4


def test_between_two_epochs_all_callers_get_the_same_workers() -> None:
    dispatcher = WorkDispatcher(3, None)
    for worker in (0, 1, 2):
        dispatcher.take(worker, 0, 3, 1)
    dispatcher.gone(2)
    assert dispatcher.present() == (0, 1)
    last = [
        dispatcher.made(0, 0),
        dispatcher.take(0, 0, 3, 1),
        dispatcher.made(0, 0),
        dispatcher.made(1, 0),
    ]
    assert last[-1] == (True, 3)

    assert dispatcher.present() == (0, 1)
    dispatcher.gone(1)
    assert dispatcher.present() == (0, 1)

    dispatcher.take(0, 1, 3, 1)
    assert dispatcher.present() == (0,)


def test_all_may_skip_the_rest_of_an_epoch_and_go_back() -> None:
    dispatcher = WorkDispatcher(2, None)
    for worker in (0, 1):
        dispatcher.take(worker, 0, 20, 2)
    for worker in (0, 1):
        dispatcher.release(worker)

    first, second = (dispatcher.take(worker, 1, 20, 2) for worker in (0, 1))
    assert [first.value(), second.value()] == [[(0, 2)], [(2, 4)]]
    for worker in (0, 1):
        dispatcher.release(worker)

    back = [dispatcher.take(worker, 0, 4, 2) for worker in (0, 1)]
    assert [each.value() for each in back] == [[(0, 2)], [(2, 4)]]


def test_an_epoch_may_be_repeated() -> None:
    dispatcher = WorkDispatcher(1, None)
    for _ in range(2):
        assert dispatcher.take(0, 5, 3, 3).value() == [(0, 3)]
        dispatcher.made(0, 0)
        assert dispatcher.take(0, 5, 3, 3).value() is None


def test_no_worker_waits_for_one_that_stopped_early() -> None:
    dispatcher = WorkDispatcher(2, 0)
    for worker in (0, 1):
        dispatcher.take(worker, 0, 20, 2)
    may, _ = dispatcher.made(0, 0)
    turn = dispatcher.turn(0)
    assert not may
    assert not turn.done()

    dispatcher.release(1)

    assert turn.done()


def test_a_limit_of_samples_ends_the_run_for_all_workers() -> None:
    dispatcher = WorkDispatcher(2, None)
    first = [dispatcher.take(worker, 0, 6, 3, 8) for worker in (0, 1)]
    assert [one.value() for one in first] == [[(0, 3)], [(3, 6)]]
    for worker in (0, 1):
        dispatcher.made(worker, 0)
    assert [dispatcher.take(worker, 0, 6, 3, 8).value() for worker in (0, 1)] == [None, None]

    second = [dispatcher.take(worker, 1, 6, 2, 8) for worker in (0, 1)]
    assert second[0].value() == [(0, 2)]
    assert not second[1].done()
    dispatcher.made(0, 0)
    assert second[1].value() is None
    assert dispatcher.take(0, 1, 6, 2, 8).value() is None

    assert dispatcher.report()["position"] == 2

    for epoch in (2, 3):
        rest = [dispatcher.take(worker, epoch, 6, 2, 8) for worker in (0, 1)]
        assert [one.value() for one in rest] == [None, None]
    assert (dispatcher.report()["position"], dispatcher.report()["trained"]) == (0, ())


def test_no_worker_waits_for_one_that_requests_the_next_epoch() -> None:
    dispatcher = WorkDispatcher(2, 0)
    for worker in (0, 1):
        dispatcher.take(worker, 0, 20, 2)
    dispatcher.release(0)
    early = dispatcher.take(0, 1, 20, 2)

    assert dispatcher.made(1, 0) == (True, 2)
    assert not early.done()
