"""Each cloud's source against its own server, over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain

import pytest

from evenstride.runtime.notices import Aws, Azure, Gcp, NoticeSource, make_sources
from evenstride.runtime.notices.gcp import MAINTENANCE, PREEMPTED
from evenstride.runtime.notices.http_transport import MOST_BYTES
from evenstride.runtime.notices.notice import Interrupted, NoAnswer
from evenstride.testing import FakeClock
from tests.messages import raises_message
from tests.unit.runtime.notices.metadata_server import (
    TOKEN,
    FakeAws,
    FakeAzure,
    FakeGcp,
    Reply,
    closed_port,
    raw_server,
    served,
)
from tests.unit.runtime.notices.test_words import AT, document, event

SPOT = b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
# Longer than any of these requests takes; a test that needs it has failed.
PATIENT_S = 30.0
SOURCES: dict[str, Callable[..., NoticeSource]] = {
    "aws": Aws,
    "gcp": lambda url, timeout_s: Gcp(PREEMPTED, url, timeout_s=timeout_s, long_poll_s=0.0),
    "azure": Azure,
}


def test_aws_requests_reuse_a_token() -> None:
    cloud = FakeAws()
    with served(cloud) as server:
        source = Aws(server.url, timeout_s=PATIENT_S)

        first = source.poll()
        cloud.action = SPOT
        second = source.poll()
        cloud.action = None
        third = source.poll()

    assert first is None and third is None
    assert second is not None and second.leaves_unix_s == AT
    action = "GET /latest/meta-data/spot/instance-action"
    assert server.paths == ["PUT /latest/api/token", action, action, action]


def test_a_token_is_renewed_before_it_ends() -> None:
    cloud, steady = FakeAws(ttl_s=600), FakeClock(0.0)
    with served(cloud) as server:
        source = Aws(server.url, timeout_s=PATIENT_S, steady=steady)

        for steady.now_s in (0.0, 500.0, 541.0, 542.0):
            source.poll()

    sent = [asked.headers[TOKEN] for asked in server.asked if asked.method == "GET"]
    assert sent == ["token-0==", "token-0==", "token-1==", "token-1=="]


def test_a_token_that_expires_early_is_replaced_at_once() -> None:
    cloud = FakeAws(action=SPOT)
    with served(cloud) as server:
        source = Aws(server.url, timeout_s=PATIENT_S)
        source.poll()

        cloud.valid.clear()
        notice = source.poll()

    assert notice is not None
    assert len(cloud.tokens) == 2


def test_a_machine_without_tokens_is_reported() -> None:
    refusal = raises_message(NoAnswer, "status 403")
    with served(lambda _: Reply(403)) as server, refusal:
        Aws(server.url, timeout_s=PATIENT_S).poll()

    assert server.paths == ["PUT /latest/api/token"]


@pytest.mark.parametrize("rebalance", [False, True])
def test_a_rebalance_recommendation_counts_only_on_request(rebalance: bool) -> None:
    cloud = FakeAws(rebalance=b'{"noticeTime": "2017-09-18T08:00:00Z"}')
    with served(cloud) as server:
        (source,) = make_sources("aws-rebalance" if rebalance else "aws", base_url=server.url)

        hint = source.poll()
        cloud.action = SPOT
        notice = source.poll()

    assert (hint is not None) is rebalance
    assert notice is not None and notice.leaves_unix_s == AT
    asked = "GET /latest/meta-data/events/recommendations/rebalance" in server.paths
    assert asked is rebalance


@pytest.mark.parametrize("ahead_s", [0.0, 1.0, 90.0, -3600.0])
def test_a_cloud_s_time_is_converted_to_this_host_s_clock(ahead_s: float) -> None:
    here = FakeClock(AT - 120.0)
    aws = FakeAws(action=SPOT, date_unix_s=here.now_s + ahead_s)
    azure = FakeAzure(events=document(event()), date_unix_s=here.now_s + ahead_s)
    with served(aws) as one, served(azure) as other:
        notices = [
            Aws(one.url, timeout_s=PATIENT_S, clock=here).poll(),
            Azure(other.url, timeout_s=PATIENT_S, clock=here).poll(),
        ]

    expected = AT - (ahead_s if abs(ahead_s) > 1 else 0.0)
    for notice in notices:
        assert notice is not None and notice.leaves_unix_s is not None
        assert abs(notice.leaves_unix_s - expected) <= 0.5


def test_gcp_responds_when_the_value_changes() -> None:
    cloud, here = FakeGcp(), FakeClock(AT)
    with served(cloud) as server:
        source = Gcp(PREEMPTED, server.url, timeout_s=PATIENT_S, clock=here)
        first = source.poll()
        found = []
        poll = threading.Thread(target=lambda: found.append(source.poll()))
        poll.start()
        assert cloud.waiting.acquire(timeout=PATIENT_S), "the request does not wait at the server"

        here.now_s = AT + 500.0
        cloud.turn("preempted", "TRUE")
        poll.join(PATIENT_S)

    assert first is None
    assert found[0] is not None and found[0].leaves_unix_s == AT + 530.0
    assert [asked.query["last_etag"] for asked in server.asked] == ["0", "1"]


def test_gcp_keeps_the_time_of_the_change() -> None:
    cloud, here = FakeGcp(), FakeClock(AT)
    with served(cloud) as server:
        source = Gcp(MAINTENANCE, server.url, timeout_s=PATIENT_S, clock=here, long_poll_s=0.0)
        source.poll()
        cloud.turn("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        first = source.poll()
        here.now_s += 10.0
        cloud.failing = True
        with raises_message(NoAnswer, "status 503"):
            source.poll()
        cloud.failing = False
        second = source.poll()
        cloud.turn("maintenance-event", "NONE")
        third = source.poll()

    assert first == second
    assert first is not None and first.leaves_unix_s == AT + 60.0
    assert third is None


def test_gcp_has_no_time_for_a_change_that_was_not_seen() -> None:
    cloud = FakeGcp()
    with served(cloud) as server:
        before = Gcp(PREEMPTED, server.url, timeout_s=PATIENT_S, long_poll_s=0.0)
        before.poll()
        cloud.failing = True
        with pytest.raises(NoAnswer):
            before.poll()
        cloud.turn("preempted", "TRUE")
        cloud.failing = False

        late = Gcp(PREEMPTED, server.url, timeout_s=PATIENT_S, long_poll_s=0.0)
        notices = [before.poll(), late.poll()]

    for notice in notices:
        assert notice is not None and notice.leaves_unix_s is None


def test_azure_reports_events_of_this_machine_and_their_withdrawal() -> None:
    cloud = FakeAzure(events=document(event(), event(EventType="Freeze")))
    with served(cloud) as server:
        source = Azure(server.url, timeout_s=PATIENT_S)

        first = source.poll()
        cloud.events = document(event(NotBefore="Mon, 18 Sep 2017 08:23:00 GMT"))
        second = source.poll()
        cloud.events = document()
        third = source.poll()

    assert first is not None and first.leaves_unix_s == AT
    assert second is not None and second.leaves_unix_s == AT + 60.0
    assert third is None
    assert [path.split("/")[-1] for path in server.paths] == ["name", *["scheduledevents"] * 3]
    assert {asked.method for asked in server.asked} == {"GET"}, "events are never acknowledged"


def test_azure_follows_an_announced_restart() -> None:
    cloud = FakeAzure(events=document(event(EventType="Reboot")))
    started = document(event(EventType="Reboot", EventStatus="Started", NotBefore=""))
    with served(cloud) as server:
        source = Azure(server.url, timeout_s=PATIENT_S)
        source.poll()

        cloud.events = started
        notice = source.poll()
        again = Azure(server.url, timeout_s=PATIENT_S).poll()

    assert notice is not None and notice.leaves_unix_s is None
    assert again is None


def test_azure_requests_the_name_until_it_is_known() -> None:
    cloud = FakeAzure(name="", events=document(event()))
    with served(cloud) as server:
        source = Azure(server.url, timeout_s=PATIENT_S)
        with raises_message(NoAnswer):
            source.poll()

        cloud.name = "worker_3"
        notice = source.poll()

    assert notice is not None


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_unexpected_status_is_no_answer(name: str, status: int) -> None:
    refusal = raises_message(NoAnswer, status)
    with served(lambda _: Reply(status, b"busy")) as server, refusal:
        SOURCES[name](server.url, timeout_s=PATIENT_S).poll()


@pytest.mark.parametrize("name", SOURCES)
def test_a_redirect_is_not_followed(name: str) -> None:
    with served(lambda _: Reply(200, b"TRUE")) as elsewhere:
        there = {"Location": elsewhere.url + "/secret"}
        refusal = raises_message(NoAnswer)
        with served(lambda _: Reply(302, b"", there)) as server, refusal:
            SOURCES[name](server.url, timeout_s=PATIENT_S).poll()

    assert elsewhere.asked == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_proxy_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(lambda _: Reply(500)) as proxy, served(lambda _: Reply(500)) as server:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(variable, proxy.url)
        with raises_message(NoAnswer, "status 500"):
            SOURCES[name](server.url, timeout_s=PATIENT_S).poll()

    assert proxy.asked == []
    assert len(server.asked) == 1


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n"
BAD = {
    "empty": ([b""], "garbage"),
    "no HTTP": ([b"\x16\x03\x01\x02\x00 tls?\r\n\r\n"], "garbage"),
    "cut short": ([HEAD + b"\r\nab"], "garbage"),
    "bad chunks": ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "garbage"),
    "bad status": ([b"HTTP/1.1 9999 OK\r\n\r\n"], "garbage"),
    "control characters": ([HEAD + b"\r\na\r\nb"], "garbage"),
    "endless": (
        [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 8192] * (MOST_BYTES // 8192 + 1)],
        "too large",
    ),
    "endless header": ([b"HTTP/1.1 200 OK\r\nA: " + b"x" * (MOST_BYTES + 1)], "too large"),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_response_is_named(name: str, bad: str) -> None:
    pieces, kind = BAD[bad]
    with raw_server(pieces) as url, pytest.raises(NoAnswer) as refused:
        SOURCES[name](url, timeout_s=PATIENT_S).poll()

    assert refused.value.kind == kind


@pytest.mark.parametrize("end", [b"", b"\r\nX-More: yes"])
def test_a_complete_response_does_not_need_the_end_of_the_connection(end: bytes) -> None:
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: 5" + end + b"\r\n\r\nFA", b"LSE"]
    with raw_server(pieces, closes=False) as url:
        assert SOURCES["gcp"](url, timeout_s=PATIENT_S).poll() is None


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\n\r\nFALSE"])
def test_a_server_that_sends_single_bytes_is_left_at_the_deadline(begins: bytes) -> None:
    done = threading.Event()
    drops = (b" " for _ in iter(lambda: done.wait(0.01), True))
    with raw_server(chain([begins], drops)) as url:
        with pytest.raises(NoAnswer) as refused:
            SOURCES["gcp"](url, timeout_s=0.2).poll()
        done.set()

    assert refused.value.kind == "timeout"


@pytest.mark.parametrize("name", SOURCES)
def test_without_a_server_no_answer_arrives(name: str) -> None:
    with raises_message(NoAnswer):
        SOURCES[name](closed_port(), timeout_s=PATIENT_S).poll()


@pytest.mark.parametrize("name", SOURCES)
def test_a_server_that_hangs_is_left_at_the_deadline(name: str) -> None:
    with raw_server(None) as url, pytest.raises(NoAnswer) as refused:
        SOURCES[name](url, timeout_s=0.05).poll()

    assert refused.value.kind == "timeout"


@pytest.mark.parametrize("name", SOURCES)
def test_a_waiting_request_can_be_interrupted(name: str) -> None:
    with raw_server(None) as url:
        source = SOURCES[name](url, timeout_s=3600.0)
        source.start()
        outcome = []

        def poll() -> None:
            try:
                source.poll()
            except Interrupted as error:
                outcome.append(error)

        thread = threading.Thread(target=poll)
        thread.start()
        source.interrupt()
        thread.join(PATIENT_S)
        source.close()
        source.close()

    assert len(outcome) == 1
