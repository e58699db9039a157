"""The watcher: its reports, their order, the errors that it survives, and its end."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.notices import Aws, Gcp, Notice, NoticeSource, NoticeWatcher, make_sources
from evenstride.runtime.notices.gcp import MAINTENANCE, PREEMPTED
from evenstride.runtime.notices.notice import Interrupted, NoAnswer
from evenstride.runtime.notices.watcher import Post
from tests.messages import check_message, raises_message
from tests.unit.runtime.notices.metadata_server import (
    FakeAws,
    FakeAzure,
    FakeGcp,
    Reply,
    closed_port,
    raw_server,
    served,
)
from tests.unit.runtime.notices.test_words import AT, document, event

DEADLINE_S = 30.0


def notice(source: str, leaves_unix_s: float | None, reason: str = "") -> Notice:
    return Notice(source, leaves_unix_s, True, False, reason)


class Scripted:
    """A source that returns the results that a test sets, when the test sets them."""

    on_network = True
    pause_s: float | None = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._says: queue.Queue[Notice | Exception | None] = queue.Queue()
        self.started = self.closed = 0

    def says(self, what: Notice | Exception | None) -> None:
        self._says.put(what)

    def start(self) -> bool:
        self.started += 1
        return True

    def poll(self) -> Notice | None:
        what = self._says.get(timeout=DEADLINE_S)
        if isinstance(what, Exception):
            raise what
        return what

    def interrupt(self) -> None:
        self._says.put(Interrupted())

    def close(self) -> None:
        self.closed += 1


class Reported:
    """The reports of a watcher, in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Notice | None] = queue.Queue()

    def __call__(self, reported: Notice | None) -> None:
        self._calls.put(reported)

    def next(self) -> Notice | None:
        return self._calls.get(timeout=DEADLINE_S)

    def nothing_more(self) -> bool:
        return self._calls.empty()


@pytest.fixture
def reported() -> Reported:
    return Reported()


@pytest.fixture
def pair(reported: Reported) -> Iterator[tuple[Scripted, Scripted, NoticeWatcher]]:
    """Two sources, watched."""
    one, other = Scripted("one"), Scripted("other")
    watcher = NoticeWatcher([one, other], reported)
    yield one, other, watcher
    watcher.close()


def test_the_earliest_notice_counts_and_after_its_withdrawal_the_next(
    pair: tuple[Scripted, Scripted, NoticeWatcher], reported: Reported
) -> None:
    one, other, watcher = pair
    early, late = notice("one", 100.0), notice("other", 200.0)

    other.says(late)
    assert reported.next() == late
    one.says(early)
    assert reported.next() == early
    assert set(watcher.notices) == {early, late}
    one.says(None)
    assert reported.next() == late
    other.says(None)
    assert reported.next() is None

    watcher.close()
    assert watcher.notice is None
    assert reported.nothing_more()


def test_only_changes_are_reported(
    pair: tuple[Scripted, Scripted, NoticeWatcher], reported: Reported
) -> None:
    one, other, watcher = pair

    one.says(None)
    one.says(notice("one", 100.0))
    one.says(notice("one", 100.0))
    one.says(notice("one", 90.0))
    first, second = reported.next(), reported.next()
    other.says(notice("other", 95.0))
    other.says(notice("other", None))

    assert [first, second] == [notice("one", 100.0), notice("one", 90.0)]
    assert reported.next() == notice("other", None)
    watcher.close()
    assert reported.nothing_more()


def test_a_failed_poll_does_not_withdraw_a_notice(
    pair: tuple[Scripted, Scripted, NoticeWatcher], reported: Reported
) -> None:
    one, _, watcher = pair

    one.says(notice("one", 100.0))
    assert reported.next() == notice("one", 100.0)
    one.says(NoAnswer("timeout", "it did not respond"))
    watcher.close()

    assert watcher.notice == notice("one", 100.0)
    assert reported.nothing_more()


def test_an_error_of_the_callback_does_not_end_the_watcher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported = Reported()

    def changed(what: Notice | None) -> None:
        reported(what)
        raise ZeroDivisionError

    source = Scripted("one")
    watcher = NoticeWatcher([source], changed)
    source.says(notice("one", 1.0))
    reported.next()
    source.says(notice("one", 2.0))

    assert reported.next() == notice("one", 2.0)
    watcher.close()
    check_message(caplog.messages)


def test_the_callback_may_close_the_watcher(reported: Reported) -> None:
    source = Scripted("one")

    def changed(what: Notice | None) -> None:
        assert watcher.notices == (what,)
        watcher.close()
        reported(what)

    watcher = NoticeWatcher([source], changed)
    source.says(notice("one", 1.0))

    assert reported.next() == notice("one", 1.0)
    watcher.close()


def test_a_process_that_does_not_poll_clouds_starts_no_source(reported: Reported) -> None:
    cloud, local = Scripted("cloud"), Scripted("local")
    local.on_network = False

    watcher = NoticeWatcher([cloud, local], reported, polls_clouds=False)
    watcher.close()

    assert (cloud.started, cloud.closed) == (0, 0)
    assert (local.started, local.closed) == (1, 1)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_an_invalid_interval_is_refused(interval_s: float, reported: Reported) -> None:
    with raises_message(ConfigError):
        NoticeWatcher([], reported, interval_s)


def test_without_a_detected_cloud_no_request_is_sent(
    tmp_path: Path, reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    (tmp_path / "sys_vendor").write_text("QEMU")

    watcher = NoticeWatcher(make_sources("auto", dmi=tmp_path), reported)
    watcher.close()
    assert attempts == []

    (tmp_path / "sys_vendor").write_text("Amazon EC2")
    post = Post(make_sources("auto", dmi=tmp_path)[0], reported, 5.0)
    post.step()
    assert len(attempts) == 1, "the guard above does not see attempts"


def test_each_kind_of_failure_is_logged_once_and_polls_get_rarer(
    reported: Reported, caplog: pytest.LogCaptureFixture
) -> None:
    source = Scripted("one")
    source.pause_s = None
    post = Post(source, reported, 2.0)
    timeout, busy = NoAnswer("timeout", "slow"), NoAnswer("status 503", "busy")

    pauses = []
    for what in (timeout, timeout, busy, timeout, ValueError("odd"), None, timeout):
        source.says(what)
        pauses.append(post.step())

    assert pauses == [4.0, 8.0, 10.0, 10.0, 10.0, 2.0, 4.0]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [("slow" in r.message, "busy" in r.message) for r in warnings] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert reported.next() is None


def test_a_failing_source_without_a_pause_does_not_spin(reported: Reported) -> None:
    source = Scripted("one")
    source.says(OSError("odd"))

    assert Post(source, reported, 5.0).step() >= 1.0


def bad_servers() -> dict[str, Any]:
    return {
        "refused": None,
        "hanging": raw_server(None),
        "garbage": raw_server([b"\x00\x01"]),
        "busy": served(lambda _: Reply(503)),
        "wrong types": served(lambda _: Reply(200, b'{"action": ["terminate"], "Events": {}}')),
    }


@pytest.mark.parametrize("kind", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("bad", bad_servers())
def test_no_server_can_end_the_watcher(
    kind: str, bad: str, reported: Reported, caplog: pytest.LogCaptureFixture
) -> None:
    server = bad_servers()[bad]
    if server is None:
        _step_twice(closed_port(), kind, reported, False)
    else:
        with server as where:
            url = where if isinstance(where, str) else where.url
            _step_twice(url, kind, reported, bad == "hanging")

    assert reported.nothing_more()
    assert caplog.text.count("for notices failed") == 1


def _step_twice(url: str, kind: str, reported: Reported, hangs: bool) -> None:
    source = make_sources(kind, base_url=url)[0]
    limit_s = 0.05 if hangs else DEADLINE_S
    vars(source)["_wire"]._timeout_s = vars(source)["_limit_s"] = limit_s
    post = Post(source, reported, 5.0)
    assert [post.step(), post.step()] == ([2.0, 4.0] if kind == "gcp" else [10.0, 10.0])


def turnstile(stop: threading.Event, _: float) -> bool:
    """Wait like a watcher, but only briefly, because the event is set at once."""
    return stop.wait(0.001)


def test_a_spot_interruption_is_reported_and_a_404_withdraws_it(reported: Reported) -> None:
    cloud = FakeAws()
    with served(cloud) as server:
        watcher = NoticeWatcher([Aws(server.url, timeout_s=DEADLINE_S)], reported, wait=turnstile)
        cloud.action = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
        first = reported.next()
        cloud.action = None
        second = reported.next()
        watcher.close()

    assert first == Notice("aws", AT, True, False, "spot interruption (stop)")
    assert second is None


def test_an_eviction_is_reported_moved_and_withdrawn(reported: Reported) -> None:
    cloud = FakeAzure(events=document(event()))
    with served(cloud) as server:
        sources = make_sources("azure", base_url=server.url)
        watcher = NoticeWatcher(sources, reported, wait=turnstile)
        first = reported.next()
        cloud.events = document(event(NotBefore="Mon, 18 Sep 2017 08:22:30 GMT"))
        second = reported.next()
        cloud.events = document()
        third = reported.next()
        watcher.close()

    assert first is not None and second is not None
    assert (first.leaves_unix_s, second.leaves_unix_s, third) == (AT, AT + 30.0, None)


def test_closing_ends_long_polls_and_leaves_no_thread_and_no_file(reported: Reported) -> None:
    cloud = FakeGcp()
    with served(cloud) as server:
        before = open_pipes()
        sources: list[NoticeSource] = [
            Gcp(key, server.url, timeout_s=DEADLINE_S) for key in (PREEMPTED, MAINTENANCE)
        ]
        watcher = NoticeWatcher(sources, reported, wait=turnstile)
        for _ in sources:
            assert cloud.waiting.acquire(timeout=DEADLINE_S)
        names = {thread.name for thread in threading.enumerate()}

        watcher.close()
        watcher.close()

        after = {thread.name for thread in threading.enumerate()}
        cloud.stop()
    ours = {name for name in names if name.startswith("evenstride-notices")}
    assert ours == {"evenstride-notices-gcp", "evenstride-notices-gcp-maintenance-event"}
    assert not ours & after
    assert open_pipes() == before


def open_pipes() -> set[str]:
    """Return the open pipes of this process; names are unique, unlike numbers."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own
            names.add(str(link.readlink()))
    return {name for name in names if name.startswith("pipe:")}


def test_closing_ends_a_pause(reported: Reported) -> None:
    cloud, pausing = FakeAws(), threading.Event()

    def wait(stop: threading.Event, pause_s: float) -> bool:
        pausing.set()
        return stop.wait(pause_s)

    with served(cloud) as server:
        sources = [Aws(server.url, timeout_s=DEADLINE_S)]
        watcher = NoticeWatcher(sources, reported, 3600.0, wait=wait)
        assert pausing.wait(DEADLINE_S)
        watcher.close()

    assert not [t for t in threading.enumerate() if t.name.startswith("evenstride-notices")]


def test_the_given_clock_is_used(reported: Reported) -> None:
    cloud = FakeGcp()
    with served(cloud) as server:
        (source, _) = make_sources("gcp", base_url=server.url, clock=lambda: AT)
        watcher = NoticeWatcher([source], reported, wait=turnstile)
        assert cloud.waiting.acquire(timeout=DEADLINE_S)
        cloud.turn("preempted", "TRUE")
        found = reported.next()
        watcher.close()

    assert found == Notice("gcp", AT + 30.0, True, False, "preemption")
