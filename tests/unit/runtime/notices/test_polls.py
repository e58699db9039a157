"""The requests of each cloud's source, and its state between responses."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.notices import (
    Aws,
    Azure,
    Gcp,
    Notice,
    NoticeWatcher,
    azure,
    gcp,
    make_sources,
)
from evenstride.runtime.notices.gcp import MAINTENANCE, PREEMPTED
from evenstride.runtime.notices.http_transport import Answer
from evenstride.runtime.notices.notice import NoAnswer
from evenstride.runtime.notices.watcher import Post
from tests.messages import check_message, raises_message
from tests.unit.runtime.notices.test_watcher import Reported, Scripted
from tests.unit.runtime.notices.test_words import AT, document, event


class Wire:
    """A wire with prepared responses; the last one is repeated."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, dict[str, str], float | None]] = []

    def ask(
        self, method: str, path: str, headers: dict[str, str], limit_s: float | None = None
    ) -> Answer:
        """Answer."""
        assert method in ("GET", "PUT")
        self.asked.append((path, headers, limit_s))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def _on(source: Any, *answers: Answer) -> Wire:
    wire = source._wire = Wire(*answers)
    return wire


def _answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    return Answer(status, body, headers)


def _token(ttl: str = "600", name: bytes = b"t") -> Answer:
    return Answer(200, name, {"x-aws-ec2-metadata-token-ttl-seconds": ttl})


def _renewals(wire: Wire) -> int:
    return sum(path == "/latest/api/token" for path, _, _ in wire.asked)


@pytest.mark.parametrize(
    ("ttl", "kept_s"),
    [("600", 540.0), ("60", 30.0), ("\N{SUPERSCRIPT TWO}", 21540.0), ("", 21540.0)],
)
def test_a_token_is_kept_until_shortly_before_its_end(ttl: str, kept_s: float) -> None:
    now = [0.0]
    source = Aws(steady=lambda: now[0])
    none = _answer(404)
    wire = _on(source, _token(ttl), none, none, _token(ttl), none)
    renewals = []
    for now[0] in (0.0, kept_s - 0.5, kept_s):
        source.poll()
        renewals.append(_renewals(wire))

    assert renewals == [1, 1, 2]


def test_after_a_refused_token_the_next_poll_asks_for_one_first() -> None:
    source = Aws(steady=lambda: 0.0)
    none, ended = _answer(404), _answer(401)
    wire = _on(source, _token(), none, ended, _answer(403), _token(name=b"new"), none)
    source.poll()
    with raises_message(NoAnswer):
        source.poll()
    source.poll()

    assert _renewals(wire) == 3
    assert wire.asked[-1][1]["X-aws-ec2-metadata-token"] == "new"


def test_a_recommendation_without_a_time_is_no_answer() -> None:
    source = Aws(rebalance=True, steady=lambda: 0.0)
    _on(source, _token(), _answer(404), _answer(200, b"{}"))
    with raises_message(NoAnswer):
        source.poll()


def test_an_etag_is_sent_back_unchanged() -> None:
    source = Gcp(PREEMPTED)
    wire = _on(source, _answer(200, b"FALSE", etag='"a&b/1"'), _answer(200, b"FALSE"))
    for _ in range(3):
        source.poll()

    tags = [path.partition("last_etag=")[2].partition("&")[0] for path, _, _ in wire.asked]
    assert tags == ["0", "%22a%26b%2F1%22", "0"]


def test_a_long_poll_may_take_its_wait_and_the_timeout() -> None:
    source = Gcp(PREEMPTED, timeout_s=5.0, long_poll_s=60.0)
    wire = _on(source, _answer(200, b"FALSE"))
    source.poll()

    path, _, limit_s = wire.asked[0]
    assert limit_s == 65.0
    assert path.endswith("&timeout_sec=60")


def test_an_invalid_response_does_not_count_as_the_last_value() -> None:
    now = [AT]
    source = Gcp(MAINTENANCE, clock=lambda: now[0])
    ends = _answer(200, b"TERMINATE_ON_HOST_MAINTENANCE")
    _on(source, _answer(200, b"NONE"), ends, _answer(503, b"busy"), ends)
    assert source.poll() is None
    first = source.poll()
    with pytest.raises(NoAnswer):
        source.poll()
    now[0] += 9.0

    assert first is not None
    assert source.poll() == first


@pytest.mark.parametrize("key", [PREEMPTED, MAINTENANCE])
def test_a_value_with_a_known_prefix_is_unknown(key: str) -> None:
    with raises_message(NoAnswer):
        gcp.parse(key, 200, b"TRUE but not quite", None)


def test_an_announced_restart_stays_a_notice_until_it_is_over() -> None:
    source = Azure()
    coming = document(event(EventType="Reboot"))
    started = document(event(EventType="Reboot", EventStatus="Started", NotBefore=""))
    name, over = _answer(200, b"worker_3"), _answer(200, document())
    _on(source, name, *(_answer(200, body) for body in (coming, started, started)), over)

    notices = [source.poll() for _ in range(4)]

    assert [notice is not None for notice in notices] == [True, True, True, False]
    withdrawable = [notice.withdrawable for notice in notices if notice is not None]
    assert withdrawable == [True, False, False]


def test_a_restart_that_had_started_when_first_seen_is_no_notice() -> None:
    source = Azure()
    started = document(event(EventType="Redeploy", EventStatus="Started", NotBefore=""))
    _on(source, _answer(200, b"worker_3"), _answer(200, started))

    assert [source.poll() for _ in range(3)] == [None] * 3


def test_only_the_first_request_for_events_may_take_minutes() -> None:
    source = Azure(timeout_s=5.0)
    wire = _on(source, _answer(200, b"worker_3"), _answer(200, document()))
    for _ in range(2):
        source.poll()

    assert [limit_s for _, _, limit_s in wire.asked] == [None, 150.0, None]


def test_an_invalid_event_is_reported_unless_another_one_counts() -> None:
    assert azure.parse(200, document("garbage", event()), "worker_3", ()) is not None
    with raises_message(NoAnswer, "JSON"):
        azure.parse(200, document("garbage", event(EventType="Freeze")), "worker_3", ())


@pytest.mark.parametrize(
    ("setting", "grace_s"),
    [("SIGUSR1@1.5", 1.5), ("SIGUSR1@999999", 999999.0), ("SIGTERM", 30.0), ("SIGHUP", None)],
)
def test_a_signal_has_its_configured_time(setting: str, grace_s: float | None) -> None:
    (source,) = make_sources(setting)

    assert list(vars(source)["_graces"].values()) == [grace_s]


def test_a_time_of_weeks_is_refused() -> None:
    with raises_message(ConfigError, "SIGUSR1", "120"):
        make_sources("SIGUSR1@1234567")


@pytest.mark.parametrize("setting", ["signals", "azure", "aws", "gcp"])
def test_every_source_uses_its_clock(setting: str) -> None:
    def clock() -> float:
        return AT

    assert all(vars(one)["_clock"] is clock for one in make_sources(setting, clock=clock))


def test_a_source_without_anything_to_poll_is_not_polled(reported: Reported) -> None:
    class Idle(Scripted):
        def start(self) -> bool:
            self.started += 1
            return False

    source = Idle("one")
    watcher = NoticeWatcher([source], reported)
    watcher.close()

    assert (source.started, source.closed) == (1, 0)


def test_a_notice_during_close_is_not_reported(reported: Reported) -> None:
    class Late(Scripted):
        def interrupt(self) -> None:
            self.says(Notice("one", 1.0, True, False, "too late"))

    watcher = NoticeWatcher([Late("one")], reported)
    watcher.close()

    assert reported.nothing_more()
    assert watcher.notice is None


@pytest.fixture
def reported() -> Reported:
    """The reports of a watcher."""
    return Reported()


def test_a_source_s_own_pause_counts_and_its_recovery_is_logged(
    reported: Reported, caplog: pytest.LogCaptureFixture
) -> None:
    source = Scripted("one")
    source.pause_s = 30.0
    post = Post(source, reported, 5.0)
    pauses = []
    with caplog.at_level(logging.INFO, logger="evenstride"):
        for what in (None, NoAnswer("timeout", "slow"), None, None):
            source.says(what)
            pauses.append(post.step())

    assert pauses == [30.0, 30.0, 30.0, 30.0]
    check_message(caplog.messages)


def test_a_source_may_fail_for_weeks(reported: Reported) -> None:
    source = Scripted("one")
    post = Post(source, reported, 5.0)
    for _ in range(1100):
        source.says(NoAnswer("timeout", "slow"))
        pause_s = post.step()

    assert pause_s == 10.0
