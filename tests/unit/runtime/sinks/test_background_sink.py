"""A slow sink does not delay the caller, and its errors arrive one call later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from evenstride.runtime.sinks.background_sink import BackgroundSink
from evenstride.runtime.sinks.snapshot import NamedMean, Snapshot
from tests.unit.runtime.sinks.made import SLOW, snapshot


class Stuck:
    """A sink that waits for a gate before every snapshot, and fails at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.gate, self.closed = threading.Event(), threading.Event()
        self.written: list[Snapshot] = []
        self._fails_at = fails_at

    def write(self, snapshot: Snapshot) -> None:
        """Keep the snapshot once the gate is open."""
        self.gate.wait(20)
        if snapshot.step == self._fails_at:
            raise OSError("no answer")
        self.written.append(snapshot)

    def close(self) -> None:
        """Note it."""
        self.closed.set()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """A sink whose gate is open at the end, so that its thread ends."""
    sink = Stuck()
    yield sink
    sink.gate.set()
    assert sink.closed.wait(20)


def test_snapshots_are_written_in_order_and_the_end_waits_for_them(stuck: Stuck) -> None:
    sink = BackgroundSink(stuck)
    for step in range(10):
        sink.write(snapshot(step))
    assert (sink.waiting, stuck.written) == (10, [])

    stuck.gate.set()
    sink.close()

    assert [one.step for one in stuck.written] == list(range(10))


def test_while_too_many_wait_only_means_and_alerts_are_kept(stuck: Stuck) -> None:
    sink = BackgroundSink(stuck)
    for step in range(100):
        mean = NamedMean(step, None, "loss", float(step))
        alerts = (SLOW,) if step == 80 else ()
        sink.write(replace(snapshot(step), found=(mean,), alerts=alerts))
    assert sink.waiting == 64

    stuck.gate.set()
    sink.close()

    means = [mean.step for one in stuck.written for mean in one.found]
    assert means == list(range(100))
    assert [one.step for one in stuck.written if one.samples] == list(range(64))
    assert stuck.written[-1].alerts == (SLOW,)


def test_an_error_is_raised_by_the_next_call() -> None:
    slow = Stuck(fails_at=1)
    slow.gate.set()
    sink = BackgroundSink(slow)
    sink.write(snapshot(0))
    sink.write(snapshot(1))
    assert slow.closed.wait(20)

    with pytest.raises(OSError, match="no answer"):
        sink.write(snapshot(2))
    with pytest.raises(OSError, match="no answer"):
        sink.close()

    assert [one.step for one in slow.written] == [0]


def test_the_end_does_not_wait_for_ever(stuck: Stuck) -> None:
    sink = BackgroundSink(stuck, close_s=0.01)
    sink.write(snapshot())

    with pytest.raises(TimeoutError, match="written: 1;"):
        sink.close()
