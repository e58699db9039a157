"""Whatever workers do in whatever order, each position of an epoch is trained exactly once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evenstride.core.sync_modes.async_schedule import Piece, WorkQueue
from tests.messages import raises_message

WORKERS = st.integers(0, 4)


def positions(piece: Piece) -> list[int]:
    return [position for stretch in piece for position in stretch]


class Epoch(RuleBasedStateMachine):
    """The handout next to sets of positions, which are what it should come to."""

    @initialize(end=st.integers(0, 60), workers=st.integers(1, 5))
    def begin(self, end: int, workers: int) -> None:
        self.handout = WorkQueue.of(end, workers)
        self.hands: list[list[list[int]]] = [[] for _ in range(workers)]
        self.returned = set[int]()
        self.trained = list[int]()
        self.begun = 0

    @rule(worker=WORKERS, samples=st.integers(0, 9))
    def give(self, worker: int, samples: int) -> None:
        worker %= len(self.hands)
        self.handout, piece = self.handout.give(worker, samples)
        given = positions(piece)

        assert all(stretch for stretch in piece)
        new = range(self.begun, self.handout.end)
        assert given == [*sorted(self.returned), *new][:samples], "returned ones first, then new"
        self.returned -= set(given)
        self.begun = max([self.begun, *(position + 1 for position in given)])
        if given:
            self.hands[worker].append(given)

    @rule(worker=WORKERS)
    def train(self, worker: int) -> None:
        worker %= len(self.hands)
        if not self.hands[worker]:
            with pytest.raises(
                ValueError, match=f"worker {worker} reports a trained piece, but has"
            ):
                self.handout.trained(worker)
            return
        self.handout = self.handout.trained(worker)
        self.trained += self.hands[worker].pop(0)

    @rule(worker=WORKERS)
    def lose(self, worker: int) -> None:
        worker %= len(self.hands)
        self.handout = self.handout.lost(worker)
        self.returned.update(*self.hands[worker])
        self.hands[worker] = []

    @invariant()
    def nothing_is_in_two_hands_and_counts_add_up(self) -> None:
        held = [positions(piece) for hand in self.handout.pieces for piece in hand]
        assert held == [piece for hand in self.hands for piece in hand]
        everywhere = [p for piece in held for p in piece] + self.trained + [*self.returned]
        assert sorted(everywhere) == list(range(self.begun))
        assert self.handout.out == sum(map(len, held))
        assert self.handout.position == len(self.trained)
        assert self.handout.left + self.handout.out + self.handout.position == self.handout.end
        assert self.handout.done == (len(self.trained) == self.handout.end)

    @invariant()
    def it_is_as_small_as_what_is_out(self) -> None:
        stretches = self.handout.returned
        assert positions(stretches) == sorted(self.returned)
        assert all(stretches)
        assert all(a.stop < b.start for a, b in pairwise(stretches))

    def teardown(self) -> None:
        if not hasattr(self, "handout"):
            return
        for worker in range(len(self.hands)):
            while self.hands[worker]:
                self.train(worker)
        while self.handout.left:
            self.give(0, 7)
            self.train(0)
        assert self.handout.done
        assert sorted(self.trained) == list(range(self.handout.end)), "each once, none left out"


TestEpoch = Epoch.TestCase


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_nothing_depends_on_how_many_samples_there_are(end: int, samples: int) -> None:
    handout, piece = WorkQueue.of(end, 1).give(0, samples)

    assert piece == (range(min(end, samples)),)
    assert (handout.begun, handout.lost(0).returned) == (len(piece[0]), piece)
    assert handout.trained(0).done == (samples >= end)


def test_an_epoch_of_nothing_is_over() -> None:
    handout = WorkQueue.of(0, 1)

    assert handout.done
    assert handout.give(0, 5) == (handout, ())


def test_a_piece_may_be_of_several_stretches_and_is_trained_as_one() -> None:
    handout = WorkQueue.of(20, 3)
    for worker in (0, 1, 2):
        handout, _ = handout.give(worker, 4)
    handout, piece = handout.lost(0).lost(2).give(1, 10)

    assert piece == (range(4), range(8, 14))
    assert handout.out == 14
    assert handout.trained(1).position == 4
    assert handout.trained(1).trained(1).position == 14


def test_pieces_of_the_lost_come_back_as_few_stretches() -> None:
    handout = WorkQueue.of(100, 2)
    for worker in (0, 1) * 10:
        handout, _ = handout.give(worker, 3)

    assert handout.lost(0).lost(1).returned == (range(60),)


def test_a_handout_does_not_change() -> None:
    before = WorkQueue.of(10, 2)
    after, _ = before.give(1, 3)

    assert before == WorkQueue.of(10, 2)
    assert after.lost(1) != after
    assert after.left == 7


@pytest.mark.parametrize("worker", [-1, 2])
def test_an_unknown_worker_is_refused(worker: int) -> None:
    handout = WorkQueue.of(10, 2)

    for call in (lambda: handout.give(worker, 1), lambda: handout.trained(worker)):
        with raises_message(ValueError, worker):
            call()
    with pytest.raises(ValueError, match=f"unknown worker {worker}"):
        handout.lost(worker)


def test_counts_that_cannot_be_are_refused() -> None:
    with raises_message(ValueError, "-1", "2 workers"):
        WorkQueue.of(-1, 2)
    with raises_message(ValueError, "10", "0 workers"):
        WorkQueue.of(10, 0)
    with raises_message(ValueError, "-1 samples", "worker 0"):
        WorkQueue.of(10, 1).give(0, -1)
