"""Google Cloud: preemption of a Spot VM, and host maintenance that ends the VM.

``computeMetadata/v1/instance/preempted`` is ``FALSE`` and turns ``TRUE`` some 30 s before the VM is
stopped. ``computeMetadata/v1/instance/maintenance-event`` is ``NONE``, and 60 s before maintenance
``MIGRATE_ON_HOST_MAINTENANCE`` (the VM moves with all it runs: no notice) or
``TERMINATE_ON_HOST_MAINTENANCE``. Every request needs ``Metadata-Flavor: Google``. With
``wait_for_change=true`` an answer comes when the value is no longer the one of ``last_etag``, at
the latest after ``timeout_sec``; the version is in the ``ETag`` header. Neither key carries a time,
so it is reckoned from when the value turned.

Sources: Compute Engine documentation, "Query metadata server for maintenance event notices" (60 s;
only for VMs that live-migrate or have GPUs, and only if the key has been asked for before, which
watching it does) and "About VM metadata" (the address as a number); for ``last_etag=0`` with
``timeout_sec``, Google's guest agent; for 503 in the midst of maintenance,
GoogleCloudPlatform/python-docs-samples, ``compute/metadata`` (which names the older
``SHUTDOWN_ON_HOST_MAINTENANCE``). Seen only in others' code: the values of ``preempted``, and that
they turn 30 s ahead, which is best effort.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from urllib.parse import quote

from evenstride.runtime.notices.http_transport import (
    LINK_LOCAL,
    MetadataService,
    plain_text,
    unexpected,
)
from evenstride.runtime.notices.notice import NoAnswer, Notice

PREEMPTED, MAINTENANCE = "preempted", "maintenance-event"
_ROOT = "/computeMetadata/v1/instance/"
_AHEAD_S = {PREEMPTED: 30.0, MAINTENANCE: 60.0}
_ENDS_THE_VM = ("TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE")
# A later version may know other events; what they mean for us is not known, but they are no fault.
_PREEMPTED, _EVENT = re.compile("TRUE|FALSE"), re.compile("[A-Z_]{1,64}")
_LONG_POLL_S = 60.0


def parse(key: str, status: int, body: bytes, turned_unix_s: float | None) -> Notice | None:
    """Return the notice in an answer.

    Args:
        key: `PREEMPTED` or `MAINTENANCE`.
        status: of the answer.
        body: of the answer.
        turned_unix_s: since when the value is what it is; ``None`` if it was so when first seen.

    Raises:
        NoAnswer: the answer says neither that there is one nor that there is none.
    """
    if status != 200:
        raise unexpected(status)
    value = plain_text(body)
    words = _PREEMPTED if key == PREEMPTED else _EVENT
    if not words.fullmatch(value):
        raise NoAnswer("garbage", f"a value of {value!r:.60} for {key} is not known")
    if value != "TRUE" and value not in _ENDS_THE_VM:
        return None
    leaves_unix_s = None if turned_unix_s is None else turned_unix_s + _AHEAD_S[key]
    reason = "preemption" if key == PREEMPTED else "host maintenance ends the machine"
    return Notice("gcp", leaves_unix_s, True, False, reason)


class Gcp(MetadataService):
    """Notices of Google Cloud, of one kind; watch both kinds with two sources.

    Each poll waits at the server for the value to change, a minute at most.

    Args:
        key: `PREEMPTED` or `MAINTENANCE`.
        base_url: of the metadata service.
        timeout_s: how long an exchange may take, beyond the waiting at the server.
        clock: seconds since 1970.
        long_poll_s: how long the server is asked to wait.
    """

    # After an answer; a change meanwhile is answered at once. Bounds what a server that does not
    # wait can cost.
    pause_s: float | None = 1.0

    def __init__(
        self,
        key: str = PREEMPTED,
        base_url: str = LINK_LOCAL,
        *,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
        long_poll_s: float = _LONG_POLL_S,
    ) -> None:
        super().__init__(base_url, timeout_s=timeout_s, clock=clock)
        self.name = "gcp" if key == PREEMPTED else f"gcp-{key}"
        self._key, self._etag, self._long_poll_s = key, "0", long_poll_s
        self._limit_s = long_poll_s + timeout_s
        self._told: bytes | None = None
        self._turned_unix_s: float | None = None
        self._missed = True

    def poll(self) -> Notice | None:
        """Wait for the value to be another than last time, at most for the long poll.

        Raises:
            NoAnswer: as of every source.
            Interrupted: as of every source.
        """
        query = f"?wait_for_change=true&last_etag={quote(self._etag, safe='')}"
        path = f"{_ROOT}{self._key}{query}&timeout_sec={self._long_poll_s:.0f}"
        missed, self._missed = self._missed, True  # should this fail, it may turn unseen
        answer = self._wire.ask("GET", path, {"Metadata-Flavor": "Google"}, self._limit_s)
        turned_unix_s = self._turned_unix_s
        if answer.body != self._told:
            turned_unix_s = None if missed else self._clock()
        notice = parse(self._key, answer.status, answer.body, turned_unix_s)
        self._told, self._turned_unix_s, self._missed = answer.body, turned_unix_s, False
        self._etag = answer.headers.get("etag", "0")
        return notice
