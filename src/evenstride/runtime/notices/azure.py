"""Azure: Scheduled Events.

``GET metadata/scheduledevents?api-version=2020-07-01`` with ``Metadata: true`` answers
``{"DocumentIncarnation": 2, "Events": [...]}``. An event has ``EventType``, ``EventStatus``
(``Scheduled``, ``Started``), ``Resources`` (names of VMs: those of a whole scale set or
availability set are told to all its members, so this VM's own name is asked for first),
``NotBefore`` (as in an HTTP date; blank once it has started). An event that is over, or was given
up, is no longer listed.

Which types mean leaving:

* ``Preempt`` and ``Terminate``: the VM is deleted.
* ``Reboot`` and ``Redeploy``: the machine comes back, this process does not. They are told from ten
  minutes to days ahead. Such an event that was ``Started`` when first seen is no notice: the list
  keeps it for some minutes after the restart, and a training that has just begun again must not
  leave for the restart it comes from.
* ``Freeze``: no notice; the process stands still for seconds and goes on.

Events are never acknowledged. That would let them begin sooner, and for every VM they name.

Source: Azure documentation, "Scheduled Events for Linux VMs" (all of the above but for the name; at
least 30 s for ``Preempt``; cancelled events are removed; the first request switches the service on
and may take two minutes). ``metadata/instance/compute/name``: "Azure Instance Metadata Service" and
clients of it; ``format=text`` was seen only in others' code.
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
# While the service is being switched on.
_FIRST_TIMEOUT_S = 150.0


def parse(status: int, body: bytes, name: str, scheduled: Collection[str]) -> Notice | None:
    """Return the earliest notice for the VM called ``name``; times are as the service told them.

    Args:
        status: of the answer.
        body: of the answer.
        name: of this VM; small and capital letters count as equal.
        scheduled: the ids of events that have been seen before they started.

    Raises:
        NoAnswer: the answer says neither that there is one nor that there is none.
    """
    events = _events(status, body)
    notices = [_notice(event, name, scheduled) for event in events if isinstance(event, dict)]
    found = earliest([notice for notice in notices if notice is not None])
    if found is None and not all(isinstance(event, dict) for event in events):
        raise NoAnswer("garbage", "one of its events is no JSON object")
    return found


def scheduled_ids(status: int, body: bytes) -> frozenset[str]:
    """Return the ids of the events that have not started.

    Raises:
        NoAnswer: as `parse`.
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
        raise NoAnswer("garbage", f"its events are no list: {body[:60]!r}")
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
        base_url: of the metadata service.
        timeout_s: how long an exchange may take; the first about the events may take longer.
        clock: seconds since 1970.
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
        """Ask once; the first time for the name of this VM, too.

        Raises:
            NoAnswer: as of every source.
            Interrupted: as of every source.
        """
        if not self._vm:
            answer = self._wire.ask("GET", NAME_PATH, _HEADERS)
            if answer.status != 200:
                raise NoAnswer(
                    f"name, status {answer.status}",
                    f"it did not tell this machine's name (status {answer.status})",
                )
            self._vm = plain_text(answer.body)
        answer = self._wire.ask("GET", EVENTS_PATH, _HEADERS, self._limit_s)
        self._limit_s = None
        notice = parse(answer.status, answer.body, self._vm, self._scheduled)
        self._scheduled |= scheduled_ids(answer.status, answer.body)
        return self._on_host_clock(notice, answer)
