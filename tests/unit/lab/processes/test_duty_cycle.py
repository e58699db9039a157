"""CPU limits by stopping and continuing: the rhythm in virtual time, and one real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.processes.cpu_limits import PERIOD_S, SignalLimits
from tests.unit.lab.fake_time import VirtualTime

PERIODS = 60
CHILD = 4711


def _run(
    world: VirtualTime,
    speed: float,
    *pids: int,
    at_wait: Callable[[SignalLimits, int], None] = lambda _limits, _count: None,
) -> None:
    """Limit one worker, go through all of the world's waits, close."""
    with pytest.MonkeyPatch.context() as patch:
        world.install(patch)
        limits = SignalLimits(1)
        world.at_wait = lambda count: at_wait(limits, count)
        for pid in pids:
            limits.join(0, pid)
        limits.set_speed(0, speed)
        world.begin()
        for thread in world.threads:
            thread.join()
        limits.close()


@given(
    speed=st.floats(0.1, 0.9),
    late_s=st.lists(st.floats(0, 0.9 * PERIOD_S), max_size=12),
)
def test_a_worker_runs_its_part_of_the_time_however_late_the_thread_wakes(
    speed: float, late_s: list[float]
) -> None:
    world = VirtualTime(late_s, waits=2 * PERIODS)

    _run(world, speed, CHILD)

    ran_s, of_s = world.ran_s(CHILD)
    assert ran_s / of_s == pytest.approx(speed, abs=2.0 / PERIODS)


@pytest.mark.parametrize(
    "late_s",
    [[0.0, 0.1 * PERIOD_S], [0.1 * PERIOD_S, 0.0], [0.3 * PERIOD_S]],
    ids=["starts late", "stops late", "misses whole runs"],
)
def test_what_lateness_takes_from_a_run_is_made_up_for(late_s: list[float]) -> None:
    world = VirtualTime(late_s, waits=2 * PERIODS)

    _run(world, 0.2, CHILD)

    ran_s, of_s = world.ran_s(CHILD)
    assert ran_s / of_s == pytest.approx(0.2, abs=0.01)


def test_a_very_slow_worker_rests_as_long_as_a_late_stop_asks_for() -> None:
    world = VirtualTime([0.8 * PERIOD_S], waits=2 * PERIODS)

    _run(world, 0.05, CHILD)

    ran_s, of_s = world.ran_s(CHILD)
    assert ran_s / of_s == pytest.approx(0.05, abs=0.01)


AWAY_S = 100.0


def _spells_s(world: VirtualTime, number: signal.Signals) -> list[float]:
    """Return how long each spell that began with a signal has lasted."""
    return [after - at for (at, _, kind), (after, *_) in pairwise(world.signals) if kind == number]


def test_a_worker_does_not_run_on_and_on_after_the_thread_was_away_while_it_was_stopped() -> None:
    world = VirtualTime([0.0, 0.0, 0.0, AWAY_S, *[0.0] * 200], waits=2 * PERIODS)

    _run(world, 0.5, CHILD)

    assert max(_spells_s(world, signal.SIGSTOP)) > AWAY_S
    assert max(_spells_s(world, signal.SIGCONT)) < 1.0


def test_a_worker_is_not_stopped_on_and_on_after_the_thread_was_away_while_it_ran() -> None:
    world = VirtualTime([0.0, 0.0, AWAY_S, *[0.0] * 200], waits=2 * PERIODS)

    _run(world, 0.5, CHILD)

    assert max(_spells_s(world, signal.SIGCONT)) > AWAY_S
    assert max(_spells_s(world, signal.SIGSTOP)) < 1.0


def test_a_punctual_cycle_stops_and_continues_once_per_period() -> None:
    world = VirtualTime([], waits=6)

    _run(world, 0.25, CHILD)

    expected_s = [0.0, 0.25, 1.0, 1.25, 2.0, 2.25, 3.0]
    assert [at_s / PERIOD_S for at_s, _, _ in world.signals] == pytest.approx(expected_s)
    assert [number for _, _, number in world.signals] == [
        *[signal.SIGCONT, signal.SIGSTOP] * 3,
        signal.SIGCONT,
    ]


@given(st.integers(1, 40))
def test_whenever_it_is_closed_every_process_is_left_running(waits: int) -> None:
    world = VirtualTime([], waits)

    _run(world, 0.5, CHILD, CHILD + 1)

    assert world.last(CHILD) == world.last(CHILD + 1) == signal.SIGCONT


def test_a_worker_at_full_speed_is_never_stopped() -> None:
    world = VirtualTime([], waits=20)

    _run(world, 1.0, CHILD)

    assert {number for _, _, number in world.signals} == {signal.SIGCONT}


@pytest.mark.parametrize("wait", [3, 4], ids=["while it runs", "while it is stopped"])
def test_a_worker_that_is_set_to_full_speed_goes_on(wait: int) -> None:
    world, last = VirtualTime([], waits=20), list[signal.Signals]()

    def speed_up(limits: SignalLimits, count: int) -> None:
        if count == wait:
            limits.set_speed(0, 1.0)
        if count == world.waits:
            last.append(world.last(CHILD))

    _run(world, 0.5, CHILD, at_wait=speed_up)

    assert last == [signal.SIGCONT]


def test_a_process_that_has_ended_does_not_keep_the_others_from_running() -> None:
    world = VirtualTime([], waits=8, gone={CHILD})

    _run(world, 0.5, CHILD, CHILD + 1)

    assert {pid for _, pid, _ in world.signals} == {CHILD + 1}
    assert world.last(CHILD + 1) == signal.SIGCONT


BUSY = """
import sys, time
print("up", flush=True)
sys.stdin.readline()
cpu_s = time.process_time()
while time.process_time() < cpu_s + 0.2: pass
print(time.process_time() - cpu_s, flush=True)
sys.stdin.readline()
print("still running", flush=True)
"""


def test_a_busy_process_runs_only_while_it_may_and_runs_on_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped, spells_s, kill = threading.Event(), list[list[float]](), os.killpg

    def noted(pid: int, number: signal.Signals) -> None:
        if number == signal.SIGCONT:
            spells_s.append([time.perf_counter()] * 2)
        kill(pid, number)
        if number == signal.SIGSTOP:
            spells_s[-1][1] = time.perf_counter()
            stopped.set()

    monkeypatch.setattr(os, "killpg", noted)
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdout.readline()
            limits = SignalLimits(1)
            try:
                limits.join(0, child.pid)
                limits.set_speed(0, 0.25)
                assert stopped.wait(30.0)
                print(file=child.stdin, flush=True)
                burnt_s = float(child.stdout.readline())
            finally:
                limits.close()
            out, _ = child.communicate("\n", timeout=30.0)
        finally:
            child.kill()

    # However late the signals are. How they follow each other is tested in virtual time.
    assert burnt_s * 0.8 < sum(end_s - begun_s for begun_s, end_s in spells_s)
    assert out == "still running\n"
