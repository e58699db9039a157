"""Who gets samples next where virtual workers do not keep step, and who waits for whom."""

from __future__ import annotations

from evenstride.core.sync_modes.async_schedule import Piece
from evenstride.sim.engine.asynchronous import SimulatedWorkQueue


def opened(workers: int, staleness: int | None, samples: int = 100) -> SimulatedWorkQueue:
    """Return a desk at which all have asked for their first samples."""
    desk = SimulatedWorkQueue(workers, staleness)
    desk.open(samples)
    desk.count([True] * workers)
    for worker in range(workers):
        desk.wait(worker)
    return desk


def begins(desk: SimulatedWorkQueue, *shares: int) -> dict[int, Piece]:
    return dict(desk.begin(lambda worker: shares[worker]))


def test_all_waiting_workers_get_their_share() -> None:
    desk = opened(2, None)

    assert begins(desk, 30, 10) == {0: (range(30),), 1: (range(30, 40),)}
    assert begins(desk, 30, 10) == {}
    desk.made(1)
    assert begins(desk, 30, 10) == {1: (range(40, 50),)}


def test_an_epoch_is_done_when_all_of_it_is_trained() -> None:
    desk = opened(2, None, samples=35)
    begins(desk, 30, 10)
    desk.made(0)

    done = [desk.done]
    assert begins(desk, 30, 10) == {}
    assert desk.waiting == (0,)
    desk.made(1)
    assert [*done, desk.done] == [False, True]
    desk.open(10)
    assert begins(desk, 4, 4) == {0: (range(4),), 1: (range(4, 8),)}


def test_samples_of_a_lost_worker_go_to_waiting_ones() -> None:
    desk = opened(2, None, samples=40)
    begins(desk, 30, 10)
    desk.made(1)
    desk.gone(0)
    desk.count([False, True])

    assert begins(desk, 0, 20) == {1: (range(20),)}
    desk.made(1)
    assert begins(desk, 0, 20) == {1: (range(20, 30),)}


def test_no_worker_gets_further_ahead_than_the_bound() -> None:
    desk = opened(2, 1)
    begins(desk, 1, 1)
    desk.made(0)

    assert begins(desk, 1, 1) == {0: (range(2, 3),)}
    desk.made(0)
    assert begins(desk, 1, 1) == {}
    desk.made(1)
    assert set(begins(desk, 1, 1)) == {0, 1}


def test_a_worker_that_joins_later_is_waited_for_from_then_on() -> None:
    desk = SimulatedWorkQueue(2, 0)
    desk.open(100)
    desk.count([True, False])
    desk.wait(0)
    for _ in range(5):
        begins(desk, 1, 0)
        desk.made(0)
    desk.count([True, True])
    desk.wait(1)

    assert set(begins(desk, 1, 1)) == {0, 1}
    desk.made(0)
    assert begins(desk, 1, 1) == {}


def test_a_worker_without_samples_is_not_waited_for() -> None:
    desk = opened(2, 0)
    begins(desk, 1, 1)
    desk.made(0)
    desk.count([True, False])

    assert set(begins(desk, 1, 0)) == {0}
    desk.made(1)  # what it had under way
    desk.made(0)
    assert set(begins(desk, 1, 0)) == {0}


def test_all_begin_an_epoch_as_far_as_each_other() -> None:
    desk = opened(2, 1, samples=3)
    begins(desk, 1, 1)
    desk.made(0)
    begins(desk, 1, 1)
    for worker in (0, 1):
        desk.made(worker)
    desk.open(10)

    assert set(begins(desk, 1, 1)) == {0, 1}
    desk.made(0)
    assert set(begins(desk, 1, 1)) == {0}
