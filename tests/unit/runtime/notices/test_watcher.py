"""The watcher: what it tells, in which order, what it survives, and how it ends."""

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
    """A source that says what a test tells it to say, when it tells it."""

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


class Told:
    """What a watcher has told, in order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Notice | None] = queue.Queue()

    def __call__(self, told: Notice | None) -> None:
        self._calls.put(told)

    def next(self) -> Notice | None:
        return self._calls.get(timeout=DEADLINE_S)

    def nothing_more(self) -> bool:
        return self._calls.empty()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def pair(told: Told) -> Iterator[tuple[Scripted, Scripted, NoticeWatcher]]:
    """Two sources, watched."""
    one, other = Scripted("one"), Scripted("other")
    watcher = NoticeWatcher([one, other], told)
    yield one, other, watcher
    watcher.close()


def test_the_earliest_wins_and_a_withdrawal_falls_back_to_the_next(
    pair: tuple[Scripted, Scripted, NoticeWatcher], told: Told
) -> None:
    one, other, watcher = pair
    early, late = notice("one", 100.0), notice("other", 200.0)

    other.says(late)
    assert told.next() == late
    one.says(early)
    assert told.next() == early
    assert set(watcher.notices) == {early, late}
    one.says(None)
    assert told.next() == late
    other.says(None)
    assert told.next() is None

    watcher.close()
    assert watcher.notice is None
    assert told.nothing_more()


def test_only_what_changes_is_told(
    pair: tuple[Scripted, Scripted, NoticeWatcher], told: Told
) -> None:
    one, other, watcher = pair

    one.says(None)
    one.says(notice("one", 100.0))
    one.says(notice("one", 100.0))
    one.says(notice("one", 90.0))
    first, second = told.next(), told.next()
    other.says(notice("other", 95.0))
    other.says(notice("other", None))

    assert [first, second] == [notice("one", 100.0), notice("one", 90.0)]
    assert told.next() == notice("other", None)
    watcher.close()
    assert told.nothing_more()


def test_a_failure_takes_no_notice_back(
    pair: tuple[Scripted, Scripted, NoticeWatcher], told: Told
) -> None:
    one, _, watcher = pair

    one.says(notice("one", 100.0))
    assert told.next() == notice("one", 100.0)
    one.says(NoAnswer("timeout", "it did not answer"))
    watcher.close()

    assert watcher.notice == notice("one", 100.0)
    assert told.nothing_more()


def test_a_fault_of_the_caller_s_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def changed(what: Notice | None) -> None:
        told(what)
        raise ZeroDivisionError

    source = Scripted("one")
    watcher = NoticeWatcher([source], changed)
    source.says(notice("one", 1.0))
    told.next()
    source.says(notice("one", 2.0))

    assert told.next() == notice("one", 2.0)
    watcher.close()
    check_message(caplog.messages)


def test_the_caller_may_close_the_watcher_from_within(told: Told) -> None:
    source = Scripted("one")

    def changed(what: Notice | None) -> None:
        assert watcher.notices == (what,)
        watcher.close()
        told(what)

    watcher = NoticeWatcher([source], changed)
    source.says(notice("one", 1.0))

    assert told.next() == notice("one", 1.0)
    watcher.close()


def test_a_process_that_does_not_poll_clouds_leaves_them_alone(told: Told) -> None:
    cloud, local = Scripted("cloud"), Scripted("local")
    local.on_network = False

    watcher = NoticeWatcher([cloud, local], told, polls_clouds=False)
    watcher.close()

    assert (cloud.started, cloud.closed) == (0, 0)
    assert (local.started, local.closed) == (1, 1)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_an_interval_that_cannot_be_is_refused(interval_s: float, told: Told) -> None:
    with raises_message(ConfigError):
        NoticeWatcher([], told, interval_s)


def test_nothing_is_asked_on_a_machine_that_shows_no_cloud(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    (tmp_path / "sys_vendor").write_text("QEMU")

    watcher = NoticeWatcher(make_sources("auto", dmi=tmp_path), told)
    watcher.close()
    assert attempts == []

    (tmp_path / "sys_vendor").write_text("Amazon EC2")
    post = Post(make_sources("auto", dmi=tmp_path)[0], told, 5.0)
    post.step()
    assert len(attempts) == 1, "the guard above does not see attempts"


def test_failures_are_said_once_per_kind_and_polls_get_rarer(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    source = Scripted("one")
    source.pause_s = None
    post = Post(source, told, 2.0)
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
    assert told.next() is None


def test_a_source_without_a_pause_cannot_spin_when_it_fails(told: Told) -> None:
    source = Scripted("one")
    source.says(OSError("odd"))

    assert Post(source, told, 5.0).step() >= 1.0


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
def test_no_server_ends_the_watch(
    kind: str, bad: str, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    server = bad_servers()[bad]
    if server is None:
        _step_twice(closed_port(), kind, told, False)
    else:
        with server as where:
            url = where if isinstance(where, str) else where.url
            _step_twice(url, kind, told, bad == "hanging")

    assert told.nothing_more()
    assert caplog.text.count("no notice from") == 1


def _step_twice(url: str, kind: str, told: Told, hangs: bool) -> None:
    source = make_sources(kind, base_url=url)[0]
    limit_s = 0.05 if hangs else DEADLINE_S
    vars(source)["_wire"]._timeout_s = vars(source)["_limit_s"] = limit_s
    post = Post(source, told, 5.0)
    assert [post.step(), post.step()] == ([2.0, 4.0] if kind == "gcp" else [10.0, 10.0])


def turnstile(stop: threading.Event, _: float) -> bool:
    """Wait as a watcher does, but not for long: what is awaited comes at once."""
    return stop.wait(0.001)


def test_a_spot_interruption_is_told_and_a_404_takes_it_back(told: Told) -> None:
    cloud = FakeAws()
    with served(cloud) as server:
        watcher = NoticeWatcher([Aws(server.url, timeout_s=DEADLINE_S)], told, wait=turnstile)
        cloud.action = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
        first = told.next()
        cloud.action = None
        second = told.next()
        watcher.close()

    assert first == Notice("aws", AT, True, False, "spot interruption (stop)")
    assert second is None


def test_an_eviction_is_told_moved_and_withdrawn(told: Told) -> None:
    cloud = FakeAzure(events=document(event()))
    with served(cloud) as server:
        sources = make_sources("azure", base_url=server.url)
        watcher = NoticeWatcher(sources, told, wait=turnstile)
        first = told.next()
        cloud.events = document(event(NotBefore="Mon, 18 Sep 2017 08:22:30 GMT"))
        second = told.next()
        cloud.events = document()
        third = told.next()
        watcher.close()

    assert first is not None and second is not None
    assert (first.leaves_unix_s, second.leaves_unix_s, third) == (AT, AT + 30.0, None)


def test_closing_ends_long_polls_and_leaves_no_thread_and_no_file(told: Told) -> None:
    cloud = FakeGcp()
    with served(cloud) as server:
        before = open_pipes()
        sources: list[NoticeSource] = [
            Gcp(key, server.url, timeout_s=DEADLINE_S) for key in (PREEMPTED, MAINTENANCE)
        ]
        watcher = NoticeWatcher(sources, told, wait=turnstile)
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
    """Return the pipes this process has open; a name is of one pipe, unlike a number."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own
            names.add(str(link.readlink()))
    return {name for name in names if name.startswith("pipe:")}


def test_closing_ends_a_pause(told: Told) -> None:
    cloud, pausing = FakeAws(), threading.Event()

    def wait(stop: threading.Event, pause_s: float) -> bool:
        pausing.set()
        return stop.wait(pause_s)

    with served(cloud) as server:
        sources = [Aws(server.url, timeout_s=DEADLINE_S)]
        watcher = NoticeWatcher(sources, told, 3600.0, wait=wait)
        assert pausing.wait(DEADLINE_S)
        watcher.close()

    assert not [t for t in threading.enumerate() if t.name.startswith("evenstride-notices")]


def test_the_clock_that_counts_is_the_one_given(told: Told) -> None:
    cloud = FakeGcp()
    with served(cloud) as server:
        (source, _) = make_sources("gcp", base_url=server.url, clock=lambda: AT)
        watcher = NoticeWatcher([source], told, wait=turnstile)
        assert cloud.waiting.acquire(timeout=DEADLINE_S)
        cloud.turn("preempted", "TRUE")
        found = told.next()
        watcher.close()

    assert found == Notice("gcp", AT + 30.0, True, False, "preemption")
