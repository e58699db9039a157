"""A lost rank is named once, to every rank, and only if it is really lost."""

from __future__ import annotations

import logging
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evenstride.errors import ConfigError, WorkerLost
from evenstride.runtime.coordination.control_plane import announce_loss
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.failures import peer_link
from evenstride.runtime.failures.peer_link import (
    LossReport,
    collective_failed,
    look_for_the_lost,
)
from evenstride.runtime.store.store_channel import Channel
from tests.messages import check_message, raises_message
from tests.unit.runtime.quiet import Clock, SetBeats, channel, message

TEXT = "rank 2 is gone: its process 7 on one ended"


def _report(to: Channel, gate: DrawBarrier) -> LossReport:
    return LossReport(to, gate, lambda: ("sync", 25))


def test_a_loss_is_logged_once_and_raised_where_training_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = DrawBarrier((3, 4))
    report = _report(channel(rank=1), gate)

    assert report.heard(TEXT)
    assert not report.heard("rank 0 is gone: it is not")

    check_message(caplog.messages, TEXT, "step 25")
    assert report.text == TEXT
    with raises_message(WorkerLost, "step 25"):
        gate.draw(25)


def test_a_rank_does_not_report_its_own_loss(caplog: pytest.LogCaptureFixture) -> None:
    gate = DrawBarrier((3, 4))
    report = _report(channel(rank=2), gate)

    assert report.heard("rank 2 is gone: no heartbeat since sync of step 25")

    check_message(caplog.messages, "rank 2", "step 25")
    with raises_message(WorkerLost, "rank 2"):
        gate.draw(25)


def test_a_detected_loss_is_sent_to_all_control_threads() -> None:
    shared = channel()
    report = _report(shared, DrawBarrier((3, 4)))

    report.found(2, "its process 7 on one ended", 6)

    for key in ("ask/6", "go/6", "go/7", "reply/6/2", "reply/7/2", "verdict/6", "verdict/7"):
        assert message(shared, key) == {"lost": TEXT}
    assert message(shared, "go/5") is None


def test_a_received_loss_is_not_announced_again() -> None:
    shared = channel()
    report = _report(shared, DrawBarrier((3, 4)))
    report.heard("rank 1 is gone: it ended")

    report.found(2, "its process 7 on one ended", 0)

    assert message(shared, "go/0") is None


def test_in_asynchronous_modes_only_the_loss_of_some_ranks_is_fatal() -> None:
    asked = list[int]()

    def forgive(rank: int) -> bool:
        asked.append(rank)
        return rank != 3

    texts = [f"rank {rank} is gone: it ended" for rank in (2, 2, 3, 0, 1)]
    for text, fatal in zip(texts, (False, False, True, True, True), strict=True):
        report = LossReport(
            channel(rank=1), DrawBarrier((3, 4)), lambda: ("sync", 25), forgive=forgive
        )
        assert report.heard(text)
        assert report.known() == fatal
        assert not report.heard(text), "it is already known"
    assert asked == [2, 2, 3], "rank 0 leads, and rank 1 is already missing"


def test_announcing_survives_the_end_of_the_store() -> None:
    class Gone(Channel):
        def put(self, key: str, text: str) -> None:
            raise RuntimeError(f"broken pipe: {key}, {text}")

    shared = channel()
    gone = Gone(0, 3, shared.timeout, shared.control, shared.meeting, shared.prompt)

    announce_loss(gone, 0, 2, TEXT)

    assert message(shared, "go/0") is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that advances only by sleeping."""
    clock = Clock()
    monkeypatch.setattr(peer_link, "time", clock)
    return clock


def _found(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def diagnose(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(peer_link, "diagnose", diagnose)


UNKNOWN = cast(Any, SetBeats({}))


def test_a_lost_rank_is_reported_and_the_others_get_time_to_receive_it(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    _found(monkeypatch, (2, "no heartbeat since data of step 25"))
    report = _report(channel(), DrawBarrier((3, 4)))

    look_for_the_lost(report, UNKNOWN, 0, 25, partial(report.found, exchange=0))

    check_message(report.text, "rank 2", "step 25")
    assert clock.now_s > 0


def test_a_rank_that_receives_the_loss_meanwhile_stays_as_long(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    report = _report(channel(), DrawBarrier((3, 4)))

    def hear(*_: object) -> None:
        report.heard(TEXT)

    monkeypatch.setattr(peer_link, "diagnose", hear)

    look_for_the_lost(report, UNKNOWN, 0, 25, partial(report.found, exchange=0))

    assert clock.now_s > 0


def test_a_lost_store_is_reported(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    _found(monkeypatch, RuntimeError("connection reset"))
    report = _report(channel(), DrawBarrier((3, 4)))

    look_for_the_lost(report, UNKNOWN, 0, 25, partial(report.found, exchange=0))

    assert report.text is not None
    assert "store is gone" in report.text
    assert clock.now_s == 0


def test_if_all_ranks_are_alive_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _found(monkeypatch, None)
    report = _report(channel(), DrawBarrier((3, 4)))

    look_for_the_lost(report, UNKNOWN, 1, 25, partial(report.found, exchange=0))

    assert report.text is None
    assert clock.now_s == 0
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    text = record.getMessage()
    check_message(text, "step 25", "rank 1")


def test_with_a_known_loss_no_rank_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    _found(monkeypatch, AssertionError("not needed"))
    report = _report(channel(), DrawBarrier((3, 4)))
    report.heard(TEXT)

    look_for_the_lost(report, UNKNOWN, 0, 25, partial(report.found, exchange=0))

    assert report.text == TEXT


@pytest.mark.parametrize(
    ("phase", "error", "failed"),
    [
        ("sync", None, True),
        ("sync", ValueError("mine"), True),
        ("compute", RuntimeError("Gloo connectFullMesh failed"), True),
        ("data", RuntimeError("Timed out waiting"), True),
        ("compute", RuntimeError("NCCL error: remote peer"), True),
        ("compute", ValueError("the data of this rank is broken"), False),
        ("compute", None, False),
        ("between", RuntimeError("NCCL error: remote process exited"), True),
        ("idle", RuntimeError("connection reset"), True),
        ("between", WorkerLost("rank 2 is gone"), True),
        ("between", ConfigError('call init_process_group("gloo")'), False),
        ("between", ValueError("the data of this rank is broken"), False),
        ("between", None, False),
    ],
)
def test_a_failed_collective_differs_from_the_users_own_error(
    monkeypatch: pytest.MonkeyPatch, phase: str, error: Exception | None, failed: bool
) -> None:
    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)

    assert collective_failed(phase) == failed


@pytest.mark.parametrize(
    ("places", "ends"),
    [
        ([("sync", 7), ("sync", 7)], True),
        ([("between", 7), ("sync", 7), ("sync", 7)], True),  # only then its device shows it
        ([("sync", 7), ("data", 7), ("data", 7)], False),  # it has received the loss
        ([("between", 7), ("sync", 7), ("compute", 8)], False),
        ([("between", 7), ("between", 7)], False),
        ([("compute", 7), ("between", 7), ("sync", 7), ("sync", 7)], True),
    ],
)
def test_a_process_that_waits_for_a_lost_rank_ends(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]], ends: bool
) -> None:
    ended, stands = list[int](), iter(places)
    now, gate = threading.Timer, DrawBarrier((3, 4))

    def at_once(_: float, *what: Any) -> threading.Timer:
        return now(0.0, *what)

    def at() -> tuple[str, int]:
        for place in stands:
            return place
        with pytest.raises(WorkerLost):
            gate.draw(8)
        return "data", 8

    monkeypatch.setattr(peer_link, "os", SimpleNamespace(_exit=ended.append))
    monkeypatch.setattr(threading, "Timer", at_once)
    report = LossReport(channel(rank=1), gate, at, restarts=True)

    report.heard(TEXT)
    while waiting := [t for t in threading.enumerate() if t.name == "evenstride-stuck"]:
        waiting[0].join()

    assert bool(ended) == ends
