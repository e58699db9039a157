"""Which virtual worker gets samples next without lockstep, and which one waits for which."""

from __future__ import annotations

from evenstride.core.sync_modes.async_schedule import Piece
from evenstride.sim.engine.asynchronous import SimulatedWorkQueue


def opened(workers: int, staleness: int | None, samples: int = 100) -> SimulatedWorkQueue:
    """Return a schedule in which all have asked for their first samples."""
    queue = SimulatedWorkQueue(workers, staleness)
    queue.open(samples)
    queue.count([True] * workers)
    for worker in range(workers):
        queue.wait(worker)
    return queue


def begins(queue: SimulatedWorkQueue, *shares: int) -> dict[int, Piece]:
    return dict(queue.begin(lambda worker: shares[worker]))


def test_all_waiting_workers_get_their_share() -> None:
    queue = opened(2, None)

    assert begins(queue, 30, 10) == {0: (range(30),), 1: (range(30, 40),)}
    assert begins(queue, 30, 10) == {}
    queue.made(1)
    assert begins(queue, 30, 10) == {1: (range(40, 50),)}


def test_an_epoch_is_done_when_all_of_it_is_trained() -> None:
    queue = opened(2, None, samples=35)
    begins(queue, 30, 10)
    queue.made(0)

    done = [queue.done]
    assert begins(queue, 30, 10) == {}
    assert queue.waiting == (0,)
    queue.made(1)
    assert [*done, queue.done] == [False, True]
    queue.open(10)
    assert begins(queue, 4, 4) == {0: (range(4),), 1: (range(4, 8),)}


def test_samples_of_a_lost_worker_go_to_waiting_ones() -> None:
    queue = opened(2, None, samples=40)
    begins(queue, 30, 10)
    queue.made(1)
    queue.gone(0)
    queue.count([False, True])

    assert begins(queue, 0, 20) == {1: (range(20),)}
    queue.made(1)
    assert begins(queue, 0, 20) == {1: (range(20, 30),)}


def test_no_worker_gets_further_ahead_than_the_bound() -> None:
    queue = opened(2, 1)
    begins(queue, 1, 1)
    queue.made(0)

    assert begins(queue, 1, 1) == {0: (range(2, 3),)}
    queue.made(0)
    assert begins(queue, 1, 1) == {}
    queue.made(1)
    assert set(begins(queue, 1, 1)) == {0, 1}


def test_a_worker_that_joins_later_is_waited_for_from_then_on() -> None:
    queue = SimulatedWorkQueue(2, 0)
    queue.open(100)
    queue.count([True, False])
    queue.wait(0)
    for _ in range(5):
        begins(queue, 1, 0)
        queue.made(0)
    queue.count([True, True])
    queue.wait(1)

    assert set(begins(queue, 1, 1)) == {0, 1}
    queue.made(0)
    assert begins(queue, 1, 1) == {}


def test_a_worker_without_samples_is_not_waited_for() -> None:
    queue = opened(2, 0)
    begins(queue, 1, 1)
    queue.made(0)
    queue.count([True, False])

    assert set(begins(queue, 1, 0)) == {0}
    queue.made(1)  # what it had under way
    queue.made(0)
    assert set(begins(queue, 1, 0)) == {0}


def test_all_begin_an_epoch_as_far_as_each_other() -> None:
    queue = opened(2, 1, samples=3)
    begins(queue, 1, 1)
    queue.made(0)
    begins(queue, 1, 1)
    for worker in (0, 1):
        queue.made(worker)
    queue.open(10)

    assert set(begins(queue, 1, 1)) == {0, 1}
    queue.made(0)
    assert set(begins(queue, 1, 1)) == {0}
