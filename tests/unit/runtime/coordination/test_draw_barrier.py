"""The gate between deciding and drawing, with both threads it is made for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.draw_barrier import BarrierReport, BatchChange, DrawBarrier
from tests.messages import raises_message

DEADLINE_S = 10.0


def test_steps_are_drawn_freely_without_a_barrier() -> None:
    gate = DrawBarrier((3, 4))

    assert [gate.draw(step) for step in range(5)] == [(3, 4)] * 5


def test_the_barrier_stands_just_above_what_was_drawn() -> None:
    gate = DrawBarrier((3, 4))
    for step in range(5):
        gate.draw(step)

    held = gate.hold()

    assert isinstance(held, BarrierReport)
    assert held.barrier == 6, "one step of slack while the exchange is in flight"
    assert gate.draw(5) == (3, 4)


def test_a_draw_at_the_barrier_waits_for_the_decision() -> None:
    waiting = threading.Event()
    gate = DrawBarrier((3, 4), ask=waiting.set)
    gate.draw(0)
    held = gate.hold()
    assert held is not None
    gate.draw(1)

    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(gate.draw, held.barrier)
        assert waiting.wait(DEADLINE_S), "the draw asks when it has to wait"
        assert not drawn.done()
        gate.decide(held.barrier, (5, 2), opening=False)

        assert drawn.result(DEADLINE_S) == (5, 2)
    assert gate.waited_s > 0


def test_a_decision_of_another_ranks_higher_barrier_takes_effect_there() -> None:
    gate = DrawBarrier((3, 4))
    gate.draw(0)
    gate.hold()

    gate.decide(4, (5, 2), opening=False)

    assert [gate.draw(step) for step in range(1, 6)] == [(3, 4)] * 3 + [(5, 2)] * 2


def test_in_the_opening_the_reply_waits_for_the_training_thread() -> None:
    asked = threading.Event()
    gate = DrawBarrier((3, 4), blocking=True, ask=asked.set)
    gate.draw(0)

    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(gate.hold)
        assert not asked.is_set()
        assert not held.done(), "step 0 is drawn, but may not have been measured yet"
        drawn = pool.submit(gate.draw, 1)
        answer = held.result(DEADLINE_S)
        assert answer is not None
        assert answer.barrier == 1
        gate.decide(1, (1, 6), opening=True)
        assert drawn.result(DEADLINE_S) == (1, 6)

    assert gate.opening
    gate.skip_opening()
    assert gate.draw(2) == (1, 6)


def test_a_rewind_lets_steps_be_drawn_again_under_the_same_decisions() -> None:
    gate = DrawBarrier((3, 4))
    for step in range(9):
        gate.draw(step)
    gate.hold()
    gate.decide(10, (5, 2), opening=False)

    gate.rewind(2)
    held = gate.hold()

    assert held is not None
    assert held.barrier == 10, "a later decision never overtakes one that still lies ahead"
    assert [gate.draw(step) for step in (2, 9)] == [(3, 4)] * 2


def test_stopping_frees_everyone() -> None:
    gate = DrawBarrier((3, 4), blocking=True)
    gate.draw(0)

    with ThreadPoolExecutor(2) as pool:
        held, drawn = pool.submit(gate.hold), None
        gate.stop()
        drawn = pool.submit(gate.draw, 1)

        assert held.result(DEADLINE_S) is None
        assert drawn.result(DEADLINE_S) == (3, 4)


def test_a_failure_is_raised_where_training_waits() -> None:
    gate = DrawBarrier((3, 4), blocking=True)
    gate.draw(0)

    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(gate.draw, 1)
        gate.fail(WorkerLost("rank 7 is gone"))

        with raises_message(WorkerLost, "rank 7"):
            drawn.result(DEADLINE_S)


def test_a_decision_that_never_comes_ends_the_wait() -> None:
    gate = DrawBarrier((3, 4), blocking=True, timeout_s=0.05)
    gate.draw(0)

    with raises_message(WorkerLost, "step 1"):
        gate.draw(1)


def test_ranks_that_applied_the_same_decisions_have_the_same_proof() -> None:
    one, other = DrawBarrier((3, 4)), DrawBarrier((3, 4))
    for gate in (one, other):
        gate.decide(3, (4, 3), opening=False)
        gate.forget_before(9)
    assert one.hold() == other.hold()

    one.decide(9, (5, 2), opening=False)
    other.decide(9, (6, 1), opening=False)

    assert one.hold() != other.hold()


TURN = BatchChange(step=3, wanted=None, most=100)


def _drawn_to(step: int) -> DrawBarrier:
    gate = DrawBarrier((3, 4))
    for one in range(step):
        gate.draw(one)
    return gate


def test_at_a_turn_a_rank_stands_still_until_the_batch_is_decided() -> None:
    gate, asked = _drawn_to(3), threading.Event()

    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(gate.turn, TURN, asked.set)
        assert asked.wait(DEADLINE_S)
        assert gate.hold() == BarrierReport(3, _drawn_to(3).hold().checksum, 3, TURN)  # type: ignore[union-attr]
        gate.decide(3, (5, 2), opening=False)  # of others who are on their way
        assert not batch.done()
        gate.decide(3, (8, 6), opening=False, batch=14)

        assert batch.result(DEADLINE_S) == 14
    assert gate.draw(3) == (8, 6)
    after = gate.hold()
    assert after is not None and after.turn is None


def test_at_an_epoch_boundary_decisions_for_later_steps_are_dropped() -> None:
    """An exchange before may have decided for a step that then belongs to the next epoch."""
    gate = _drawn_to(3)
    gate.decide(4, (1, 6), opening=False)

    with ThreadPoolExecutor(1) as pool:
        asked = threading.Event()
        batch = pool.submit(gate.turn, TURN, asked.set)
        assert asked.wait(DEADLINE_S)
        held = gate.hold()
        assert held is not None and held.barrier == 3
        gate.decide(3, (8, 6), opening=False, batch=14)
        assert batch.result(DEADLINE_S) == 14

    assert [gate.draw(step) for step in (3, 4, 5)] == [(8, 6)] * 3


def test_a_rank_whose_batch_change_is_unknown_asks_again() -> None:
    gate, asked = _drawn_to(3), threading.Semaphore(0)

    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(gate.turn, TURN, asked.release)
        assert asked.acquire(timeout=DEADLINE_S)
        gate.decide(4, None, opening=False)  # of an exchange that it had replied to before
        assert asked.acquire(timeout=DEADLINE_S)
        gate.hold()
        gate.decide(3, None, opening=False, batch=7)

        assert batch.result(DEADLINE_S) == 7
    assert gate.draw(3) == (3, 4)


def test_in_the_opening_the_next_decision_comes_one_step_after_another_batch() -> None:
    gate, asked = DrawBarrier((3, 4), blocking=True), threading.Event()
    turn = BatchChange(step=0, wanted=14, most=100)

    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(gate.turn, turn, asked.set)
        assert asked.wait(DEADLINE_S)
        gate.hold()
        gate.decide(0, (8, 6), opening=True, batch=14)
        assert batch.result(DEADLINE_S) == 14
        assert gate.draw(0) == (8, 6)

        waits = pool.submit(gate.draw, 1)
        held = gate.hold()
        assert held is not None and held.barrier == 1
        assert not waits.done()
        gate.decide(1, (7, 7), opening=False)
        assert waits.result(DEADLINE_S) == (7, 7)


def test_a_turn_ends_with_the_run() -> None:
    with ThreadPoolExecutor(1) as pool:
        for end, gate in ((DrawBarrier.stop, DrawBarrier((7,))), (None, DrawBarrier((7,)))):
            asked = threading.Event()
            batch = pool.submit(gate.turn, BatchChange(0, None, 9), asked.set)
            assert asked.wait(DEADLINE_S)
            if end is not None:
                end(gate)
                assert batch.result(DEADLINE_S) is None
            else:
                gate.fail(WorkerLost("rank 7 is gone"))
                with raises_message(WorkerLost, "rank 7"):
                    batch.result(DEADLINE_S)

    with raises_message(WorkerLost, "step 0"):
        DrawBarrier((7,), timeout_s=0.05).turn(BatchChange(0, None, 9), lambda: None)
