"""The meaning of the clouds' responses, the firmware's data and the setting, without a network."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.runtime.notices import Notice, aws, azure, detect_cloud, earliest, gcp, make_sources
from evenstride.runtime.notices.http_transport import Wire, http_date_unix_s, plain_text
from evenstride.runtime.notices.notice import NoAnswer, skew_s
from tests.messages import raises_message

# 2017-09-18 08:22:00 UTC
AT = 1505722920.0
PARSERS = {
    "aws": aws.parse,
    "rebalance": aws.parse_rebalance,
    "gcp": lambda status, body: gcp.parse(gcp.PREEMPTED, status, body, None),
    "maintenance": lambda status, body: gcp.parse(gcp.MAINTENANCE, status, body, 0.0),
    "azure": lambda status, body: azure.parse(status, body, "worker_3", ()),
    "scheduled": azure.scheduled_ids,
}


def event(**other: Any) -> dict[str, Any]:
    """Return an event as in the documentation of Scheduled Events."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["worker_2", "worker_3"],
        "NotBefore": "Mon, 18 Sep 2017 08:22:00 GMT",
        "Description": "Virtual machine is going to be evicted.",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **other,
    }


def document(*events: Any) -> bytes:
    return json.dumps({"DocumentIncarnation": 2, "Events": list(events)}).encode()


@pytest.mark.parametrize(
    ("body", "leaves_unix_s"),
    [
        (b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', AT),
        (b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}', AT),
        (b'{"action": "stop", "time": "2017-09-18T10:22:00+02:00"}', AT),
        (b'{"action": "stop", "time": "2017-09-18T08:22:00"}', AT),
        (b'{"action": "hibernate", "time": "2017-09-18T08:22:00Z"}', None),
        (b'{"action": "hibernate"}', None),
        (b'{"action": "terminate", "time": "soon"}', None),
        (b'{"action": "terminate", "time": 17}', None),
    ],
)
def test_aws_reports_the_time_of_an_interruption(body: bytes, leaves_unix_s: float | None) -> None:
    notice = aws.parse(200, body)

    assert notice is not None
    assert notice.leaves_unix_s == leaves_unix_s
    assert (notice.source, notice.whole_host, notice.withdrawable) == ("aws", True, False)


def test_a_time_without_a_zone_is_utc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "XYZ-9")
    time.tzset()
    try:
        notice = aws.parse(200, b'{"action": "stop", "time": "2017-09-18T08:22:00"}')
    finally:
        monkeypatch.undo()
        time.tzset()

    assert notice is not None and notice.leaves_unix_s == AT


def test_aws_has_no_notice_without_a_document() -> None:
    assert aws.parse(404, b"<html>") is None
    assert aws.parse_rebalance(404, b"") is None


def test_a_rebalance_recommendation_may_be_withdrawn() -> None:
    notice = aws.parse_rebalance(200, b'{"noticeTime": "2020-10-27T08:22:00Z"}')

    assert notice == Notice("aws", None, True, True, "rebalance recommendation")


@pytest.mark.parametrize(
    ("key", "value", "leaves_unix_s"),
    [
        (gcp.PREEMPTED, b"TRUE", AT + 30),
        (gcp.MAINTENANCE, b"TERMINATE_ON_HOST_MAINTENANCE", AT + 60),
        (gcp.MAINTENANCE, b"SHUTDOWN_ON_HOST_MAINTENANCE\n", AT + 60),
    ],
)
def test_gcp_counts_from_the_change_of_the_value(
    key: str, value: bytes, leaves_unix_s: float
) -> None:
    notice = gcp.parse(key, 200, value, AT)
    unseen = gcp.parse(key, 200, value, None)

    assert notice is not None and unseen is not None
    assert (notice.leaves_unix_s, unseen.leaves_unix_s) == (leaves_unix_s, None)
    assert notice.whole_host


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (gcp.PREEMPTED, b"FALSE"),
        (gcp.MAINTENANCE, b"NONE"),
        (gcp.MAINTENANCE, b"MIGRATE_ON_HOST_MAINTENANCE"),
        (gcp.MAINTENANCE, b"A_WORD_OF_A_LATER_VERSION"),
    ],
)
def test_gcp_has_no_notice_if_the_machine_continues(key: str, value: bytes) -> None:
    assert gcp.parse(key, 200, value, AT) is None


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_reports_events_that_end_this_process(kind: str) -> None:
    notice = azure.parse(200, document(event(EventType=kind)), "WORKER_3", ())

    assert notice == Notice("azure", AT, True, True, f"scheduled event ({kind})")


@pytest.mark.parametrize(
    "other",
    [
        event(EventType="Freeze"),
        event(EventType="Repaint"),
        event(Resources=["worker_2", "worker_33"]),
        event(Resources="worker_3"),
        event(Resources=None),
        event(Resources=["", None, {}]),
    ],
    ids=["freeze", "unknown", "others", "no list", "none", "no names"],
)
def test_azure_has_no_notice_if_this_process_continues(other: dict[str, Any]) -> None:
    assert azure.parse(200, document(other), "worker_3", ()) is None


def test_the_earliest_event_of_azure_counts() -> None:
    late = event(EventType="Redeploy", NotBefore="Mon, 25 Sep 2017 08:22:00 GMT")

    notice = azure.parse(200, document(late, "garbage", event(), late), "worker_3", ())

    assert notice is not None and notice.leaves_unix_s == AT


def test_an_eviction_that_has_started_may_end_any_moment() -> None:
    started = event(EventStatus="Started", NotBefore="")

    notice = azure.parse(200, document(started), "worker_3", ())

    assert notice == Notice("azure", None, True, False, "scheduled event (Preempt)")


def test_a_started_restart_is_the_one_before_this_process() -> None:
    started = event(EventType="Reboot", EventStatus="Started", NotBefore="")

    unseen = azure.parse(200, document(started), "worker_3", ())
    seen = azure.parse(200, document(started), "worker_3", {started["EventId"]})

    assert unseen is None
    assert seen is not None and seen.leaves_unix_s is None


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("status", [200, 204, 400, 403, 429, 500, 503])
@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"[" * 60000, b"null", b"[]", b'{"a":', b'{"Events": 3}']
)
def test_an_invalid_response_is_no_answer(name: str, status: int, body: bytes) -> None:
    with pytest.raises(NoAnswer):
        PARSERS[name](status, body)


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.sampled_from(["Preempt", "worker_3"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
_fields = st.sampled_from(
    ["action", "time", "EventType", "EventStatus", "EventId", "Resources", "NotBefore"]
)


@given(
    parser=st.sampled_from(sorted(PARSERS)),
    status=st.sampled_from([200, 404, 500]),
    body=st.binary()
    | st.dictionaries(_fields, _json).map(lambda reported: json.dumps(reported).encode())
    | st.lists(st.dictionaries(_fields, _json) | _json).map(lambda reported: document(*reported)),
)
def test_no_response_crashes_a_parser(parser: str, status: int, body: bytes) -> None:
    with suppress(NoAnswer):
        PARSERS[parser](status, body)


@given(st.lists(st.none() | st.floats(0, 1e10)))
def test_the_earliest_notice_is_never_after_another(times: list[float | None]) -> None:
    first = earliest(Notice("x", time, True, False, "") for time in times)

    if not times or first is None:
        assert not times and first is None
    elif None in times:
        assert first.leaves_unix_s is None
    else:
        assert first.leaves_unix_s == min(time for time in times if time is not None)


@given(
    skew=st.floats(-1e5, 1e5),
    now=st.floats(1e9, 2e9),
    late=st.floats(0, 0.9),
    steps=st.integers(1, 4),
)
def test_a_skew_is_measured_from_headers_and_kept(
    skew: float, now: float, late: float, steps: int
) -> None:
    known = 0.0
    found = []
    for step in range(steps):
        at = now + 5.3 * step
        known = skew_s(known, float(int(at + skew - late)), at)
        found.append(known)

    assert all(abs(each - skew) <= 1.5 + 0.5 + 0.9 for each in found)
    assert sum(a != b for a, b in pairwise([0.0, *found])) <= 1


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "m5a.large\n"}, "aws"),
        ({"sys_vendor": "Xen\n", "bios_version": "4.11.amazon\n"}, "aws"),
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, "gcp"),
        (
            {
                "sys_vendor": "Microsoft Corporation\n",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation\n", "chassis_asset_tag": "None\n"}, None),
        ({"sys_vendor": "Google\n", "product_name": "Eve\n"}, None),
        ({"sys_vendor": "Xen\n", "bios_version": "4.11\n"}, None),
        ({"sys_vendor": "QEMU\n", "bios_version": "amazon\n"}, None),
        ({}, None),
    ],
)
def test_the_cloud_is_detected_from_the_firmware(
    tmp_path: Path, files: dict[str, str], cloud: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert detect_cloud(tmp_path) == cloud
    assert detect_cloud(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("off", []),
        ("auto", ["azure", "signals"]),
        (" Auto , SIGUSR1@120", ["azure", "signals"]),
        ("aws,signals", ["aws", "signals"]),
        ("aws-rebalance", ["aws"]),
        ("gcp", ["gcp", "gcp-maintenance-event"]),
        ("sigterm", ["signals"]),
    ],
)
def test_a_setting_names_the_sources(tmp_path: Path, setting: str, names: list[str]) -> None:
    (tmp_path / "chassis_asset_tag").write_text("7783-7084-3265-9085-8269-3286-77")

    sources = make_sources(setting, dmi=tmp_path)

    assert [source.name for source in sources] == names


@pytest.mark.parametrize(
    ("setting", "slurm", "graces"),
    [
        ("signals", False, {"SIGTERM": 30.0}),
        ("signals", True, {"SIGTERM": 30.0, "SIGUSR1": None, "SIGUSR2": None}),
        ("signals,SIGTERM@15", False, {"SIGTERM": 15.0}),
        ("SIGUSR1@120,auto", True, {"SIGTERM": 30.0, "SIGUSR1": 120.0, "SIGUSR2": None}),
        ("SIGUSR2", True, {"SIGUSR2": None}),
    ],
)
def test_a_setting_names_signals_and_their_times(
    tmp_path: Path, setting: str, slurm: bool, graces: dict[str, float | None]
) -> None:
    (source,) = make_sources(setting, slurm=slurm, dmi=tmp_path)

    found = vars(source)["_graces"]
    assert found == {signal.Signals[name]: grace for name, grace in graces.items()}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("awz", ()),
        ("", ()),
        ("auto,,gcp", ()),
        ("SIGKILL", ()),
        ("aws@30", ()),
        ("SIGUSR1@soon", ("SIGUSR1", "120")),
        ("SIGUSR1@", ("SIGUSR1", "120")),
        ("off,aws", ()),
        ("SIGUSR1@20,SIGUSR1@30", ("SIGUSR1", "120")),
        ("SIGTERM, sigterm@15", ("SIGTERM",)),
        ("auto,SIGUSR1@20,SIGUSR1@20", ("SIGUSR1",)),
    ],
)
def test_an_invalid_setting_is_refused_with_the_valid_ones(
    setting: str, said: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *said):
        make_sources(setting)


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1", "169.254.169.254", "http://", "http://a/?b", "http://a b"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with raises_message(ConfigError):
        Wire(url, 1.0)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_an_unsafe_request_is_not_sent(path: str) -> None:
    wire = Wire("http://127.0.0.1:9", 1.0)

    with pytest.raises(NoAnswer) as in_path:
        wire.ask("GET", path, {})
    with pytest.raises(NoAnswer) as in_header:
        wire.ask("GET", "/a", {"X": path.replace(" ", "\n")})

    assert (in_path.value.kind, in_header.value.kind) == ("garbage", "garbage")


@pytest.mark.parametrize("body", [b"", b" \n", b"a\nb", b"a\x00b", b"\xff"])
def test_anything_but_a_line_of_text_is_garbage(body: bytes) -> None:
    with raises_message(NoAnswer):
        plain_text(body)
    assert plain_text(b" worker_3\n") == "worker_3"


@pytest.mark.parametrize("text", ["", "soon", "Mon, 99 Sep 2016 18:29:47 GMT", "Mon, 19 Sep 0"])
def test_an_invalid_date_is_ignored(text: str) -> None:
    assert http_date_unix_s(text) is None
    assert http_date_unix_s("Mon, 18 Sep 2017 08:22:00 GMT") == AT


def test_watching_needs_no_torch() -> None:
    code = "import sys, evenstride.runtime.notices; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
