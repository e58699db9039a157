"""Azure: Scheduled Events.

``GET metadata/scheduledevents?api-version=2020-07-01`` with ``Metadata: true`` returns
``{"DocumentIncarnation": 2, "Events": [...]}``. An event has these fields:

* ``EventType``.
* ``EventStatus``: ``Scheduled`` or ``Started``.
* ``Resources``: names of VMs. All VMs of a scale set or an availability set see the same list, so
  this VM's own name is requested first.
* ``NotBefore``: an HTTP date; blank after the start of the event.

Finished and cancelled events are removed from the list. The types mean:

* ``Preempt`` and ``Terminate``: the VM is deleted.
* ``Reboot`` and ``Redeploy``: the machine comes back, but this process ends. They are announced ten
  minutes to days ahead. If such an event is ``Started`` when first seen, it is not a notice: it
  stays in the list for some minutes after the restart, when the training has just resumed.
* ``Freeze``: not a notice. The process pauses for some seconds and continues.

Events are never acknowledged, because that would start them earlier for every VM they name.

Source: Azure documentation, "Scheduled Events for Linux VMs" (all of the above except the name; at
least 30 s for ``Preempt``; cancelled events are removed; the first request switches the service on
and may take two minutes). ``metadata/instance/compute/name``: "Azure Instance Metadata Service" and
its clients; ``format=text`` is known only from other projects' code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from evenstride.runtime.notices.http_transport import (
    LINK_LOCAL,
    MetadataService,
    http_date_unix_s,
    json_object,
    plain_text,
    unexpected,
)
from evenstride.runtime.notices.notice import NoAnswer, Notice, earliest

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_GONE_FOR_GOOD = ("Preempt", "Terminate")
_COMES_BACK = ("Reboot", "Redeploy")
# The first request switches the service on.
_FIRST_TIMEOUT_S = 150.0


def parse(status: int, body: bytes, name: str, scheduled: Collection[str]) -> Notice | None:
    """Return the earliest notice for the VM ``name``; times are by the service's clock.

    Args:
        status: the response's status.
        body: the response's body.
        name: this VM's name; case is ignored.
        scheduled: the ids of events that were seen before they started.

    Raises:
        NoAnswer: the response is invalid, so it is not known whether there is a notice.
    """
    events = _events(status, body)
    notices = [_notice(event, name, scheduled) for event in events if isinstance(event, dict)]
    found = earliest([notice for notice in notices if notice is not None])
    if found is None and not all(isinstance(event, dict) for event in events):
        raise NoAnswer("garbage", "one of its events is not a JSON object")
    return found


def scheduled_ids(status: int, body: bytes) -> frozenset[str]:
    """Return the ids of the events that have not started.

    Raises:
        NoAnswer: as in `parse`.
    """
    return frozenset(
        str(event.get("EventId"))
        for event in _events(status, body)
        if isinstance(event, dict) and event.get("EventStatus") == "Scheduled"
    )


def _events(status: int, body: bytes) -> list[Any]:
    if status != 200:
        raise unexpected(status)
    events = json_object(body).get("Events")
    if not isinstance(events, list):
        raise NoAnswer("garbage", f"its events are not a list: {body[:60]!r}")
    return events


def _notice(event: dict[str, Any], name: str, scheduled: Collection[str]) -> Notice | None:
    kind, status, names = event.get("EventType"), event.get("EventStatus"), event.get("Resources")
    if kind not in (*_GONE_FOR_GOOD, *_COMES_BACK):
        return None
    if not isinstance(names, list) or name.lower() not in (str(n).lower() for n in names):
        return None
    started = status == "Started"
    if started and kind in _COMES_BACK and str(event.get("EventId")) not in scheduled:
        return None
    not_before = None if started else http_date_unix_s(str(event.get("NotBefore") or ""))
    return Notice("azure", not_before, True, not started, f"scheduled event ({kind})")


class Azure(MetadataService):
    """Notices of Azure.

    Args:
        base_url: address of the metadata service.
        timeout_s: the limit for a request and its response; the first one for events has a longer
            limit.
        clock: returns Unix time in seconds.
    """

    name = "azure"

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(base_url, timeout_s=timeout_s, clock=clock)
        self._vm = ""
        self._limit_s: float | None = max(timeout_s, _FIRST_TIMEOUT_S)
        self._scheduled: frozenset[str] = frozenset()

    def poll(self) -> Notice | None:
        """Request the events once; the first time also the name of this VM.

        Raises:
            NoAnswer: see `NoticeSource.poll`.
            Interrupted: see `NoticeSource.poll`.
        """
        if not self._vm:
            answer = self._wire.ask("GET", NAME_PATH, _HEADERS)
            if answer.status != 200:
                raise NoAnswer(
                    f"name, status {answer.status}",
                    f"it did not return this machine's name (status {answer.status})",
                )
            self._vm = plain_text(answer.body)
        answer = self._wire.ask("GET", EVENTS_PATH, _HEADERS, self._limit_s)
        self._limit_s = None
        notice = parse(answer.status, answer.body, self._vm, self._scheduled)
        self._scheduled |= scheduled_ids(answer.status, answer.body)
        return self._on_host_clock(notice, answer)
