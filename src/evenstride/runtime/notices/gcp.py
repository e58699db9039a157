"""Google Cloud: preemption of a Spot VM, and host maintenance that ends the VM.

``computeMetadata/v1/instance/preempted`` changes from ``FALSE`` to ``TRUE`` some 30 s before the
VM is stopped. ``computeMetadata/v1/instance/maintenance-event`` is ``NONE``. It changes 60 s before
maintenance to ``MIGRATE_ON_HOST_MAINTENANCE`` (the VM keeps running on another host: not a notice)
or to ``TERMINATE_ON_HOST_MAINTENANCE``. Every request needs ``Metadata-Flavor: Google``. With
``wait_for_change=true`` the server responds when the value differs from that of ``last_etag``, at
the latest after ``timeout_sec``. The ``ETag`` header has the version. Neither key carries a time,
so the time is computed from the change of the value.

Sources: Compute Engine documentation, "Query metadata server for maintenance event notices" (60 s;
only for VMs that live-migrate or have GPUs, and only after a first request for the key). "About VM
metadata": the numeric address. Google's guest agent: ``last_etag=0`` with ``timeout_sec``.
GoogleCloudPlatform/python-docs-samples, ``compute/metadata``:
status 503 during maintenance, and the older ``SHUTDOWN_ON_HOST_MAINTENANCE``. Known only from other
projects' code: the values of ``preempted``, and the 30 s, which are best effort.
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
# A later version may have other events. Their meaning is unknown, but they are not errors.
_PREEMPTED, _EVENT = re.compile("TRUE|FALSE"), re.compile("[A-Z_]{1,64}")
_LONG_POLL_S = 60.0


def parse(key: str, status: int, body: bytes, turned_unix_s: float | None) -> Notice | None:
    """Return the notice in a response.

    Args:
        key: `PREEMPTED` or `MAINTENANCE`.
        status: the response's status.
        body: the response's body.
        turned_unix_s: the time of the value's last change; ``None`` if no change was seen.

    Raises:
        NoAnswer: the response is invalid, so it is not known whether there is a notice.
    """
    if status != 200:
        raise unexpected(status)
    value = plain_text(body)
    words = _PREEMPTED if key == PREEMPTED else _EVENT
    if not words.fullmatch(value):
        raise NoAnswer("garbage", f"its response has an unknown value {value!r:.60} for {key}")
    if value != "TRUE" and value not in _ENDS_THE_VM:
        return None
    leaves_unix_s = None if turned_unix_s is None else turned_unix_s + _AHEAD_S[key]
    reason = "preemption" if key == PREEMPTED else "host maintenance ends the machine"
    return Notice("gcp", leaves_unix_s, True, False, reason)


class Gcp(MetadataService):
    """Notices of Google Cloud, of one kind; watch both kinds with two sources.

    In each poll the server waits for the value to change, at most for a minute.

    Args:
        key: `PREEMPTED` or `MAINTENANCE`.
        base_url: address of the metadata service.
        timeout_s: the limit for a request and its response, beyond the server's wait.
        clock: returns Unix time in seconds.
        long_poll_s: the requested wait of the server, in seconds.
    """

    # The pause after a response. It limits the cost if a server does not wait; a change during the
    # pause is returned at once by the next poll.
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
        self._last: bytes | None = None
        self._turned_unix_s: float | None = None
        self._missed = True

    def poll(self) -> Notice | None:
        """Wait until the value differs from the last one, at most for the long poll.

        Raises:
            NoAnswer: see `NoticeSource.poll`.
            Interrupted: see `NoticeSource.poll`.
        """
        query = f"?wait_for_change=true&last_etag={quote(self._etag, safe='')}"
        path = f"{_ROOT}{self._key}{query}&timeout_sec={self._long_poll_s:.0f}"
        missed, self._missed = self._missed, True  # if this fails, a change may be missed
        answer = self._wire.ask("GET", path, {"Metadata-Flavor": "Google"}, self._limit_s)
        turned_unix_s = self._turned_unix_s
        if answer.body != self._last:
            turned_unix_s = None if missed else self._clock()
        notice = parse(self._key, answer.status, answer.body, turned_unix_s)
        self._last, self._turned_unix_s, self._missed = answer.body, turned_unix_s, False
        self._etag = answer.headers.get("etag", "0")
        return notice
