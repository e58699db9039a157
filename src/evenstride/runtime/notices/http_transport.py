"""Ask a metadata service over HTTP so that nothing it does can hold anybody up.

``urllib`` and ``http.client`` time out per read, so a server that sends a byte a second holds its
client for hours; and a thread in the midst of them cannot be called back. Here a timer shuts the
socket down at the end of the one deadline of an exchange, and `Wire.interrupt` does so at once; the
read in progress then fails. Proxies are not used and redirects not followed: a metadata service is
on this machine's own link.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, LineTooLong
from typing import Any
from urllib.parse import urlsplit

from evenstride.errors import ConfigError
from evenstride.runtime.notices.notice import Interrupted, NoAnswer, Notice, skew_s

# The address of all three clouds' metadata services. A number: looking up a name cannot be timed.
LINK_LOCAL = "http://169.254.169.254"
# Far more than any of these services answers.
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: the status, the body, and headers by their names in small letters."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def date_unix_s(self) -> float | None:
        """When the server says it answered; ``None`` if it does not say."""
        return http_date_unix_s(self.headers.get("date", ""))


def http_date_unix_s(text: str) -> float | None:
    """Return the seconds since 1970 of ``Mon, 19 Sep 2016 18:29:47 GMT``, or ``None``."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


class Wire:
    """Requests to one server, one at a time, each on a connection of its own.

    ``timeout_s`` limits an exchange from the connection to the last byte.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname or parts.query or _unsafe(base_url, " "):
            raise ConfigError(
                f"a metadata service was to be asked at {base_url!r}; possible is http:// with a "
                "host, a port and a path; change the address"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        # Held while the exchange in progress is replaced, so that an interrupt misses none.
        self._lock = threading.Lock()
        self._exchange: _Exchange | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """Make the request in progress, and every later one, raise `Interrupted`."""
        with self._lock:
            self._interrupted = True
            if self._exchange is not None:
                self._exchange.cut()

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> Answer:
        """Return the server's answer, whatever its status, unless it is a redirect.

        ``method`` is GET or PUT, always without a body. Raises NoAnswer if there is no answer, or
        not in time, or no HTTP, or a redirect; raises Interrupted after `interrupt`.
        """
        if _unsafe(path, " ") or any(_unsafe(value) for value in headers.values()):
            raise NoAnswer("garbage", "what it sent before cannot be sent back to it")
        exchange = self._begin(self._timeout_s if timeout_s is None else timeout_s)
        try:
            answer = exchange.run(method, self._prefix + path, headers)
        except NoAnswer:
            if self._interrupted:
                raise Interrupted from None
            raise
        if 300 <= answer.status < 400:
            raise NoAnswer("redirect", f"it redirected elsewhere ({answer.status})")
        return answer

    def _begin(self, limit_s: float) -> _Exchange:
        exchange = _Exchange(self._host, self._port, limit_s)
        with self._lock:
            if self._interrupted:
                raise Interrupted
            self._exchange = exchange
        return exchange


class _Exchange:
    """One request and its answer, within one limit of time."""

    def __init__(self, host: str, port: int, limit_s: float) -> None:
        self._host = host
        self._port = port
        self._limit_s = limit_s
        self._socket: socket.socket | None = None
        self._cut = False

    def cut(self) -> None:
        """End the exchange. From any thread."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is not connected yet, or not any more
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        timer = threading.Timer(self._limit_s, self.cut)
        timer.daemon = True
        timer.start()
        try:
            return self._answer(method, path, headers)
        except (OSError, HTTPException, ValueError) as error:
            if self._cut or isinstance(error, TimeoutError):
                text = f"it did not answer within {self._limit_s:g} s"
                raise NoAnswer("timeout", text) from error
            if isinstance(error, LineTooLong):
                raise _too_large() from error
            # Before OSError: `RemoteDisconnected` is an error of both kinds.
            if isinstance(error, HTTPException) or not isinstance(error, OSError):
                raise NoAnswer("garbage", f"its answer is no HTTP ({error!r:.80})") from error
            raise NoAnswer("unreachable", f"it cannot be reached ({error})") from error
        finally:
            timer.cancel()

    def _answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )[0]
        connection = HTTPConnection(self._host, self._port)
        # Made here and not by the connection, so that `cut` also ends the wait to connect.
        with socket.socket(family, kind, protocol) as sock:
            self._socket = sock
            sock.settimeout(self._limit_s)
            sock.connect(address)
            if self._cut:  # while there was nothing to shut down yet
                raise TimeoutError
            connection.sock = sock
            connection.request(method, path, headers={"Connection": "close", **headers})
            with connection.getresponse() as response:
                body = response.read(MOST_BYTES + 1)
                if self._cut:  # a body without a length looks whole where the connection ends
                    raise TimeoutError
                if len(body) > MOST_BYTES:
                    raise _too_large()
                if response.length:
                    raise HTTPException(f"the last {response.length} bytes are missing")
                known = {name.lower(): value for name, value in response.getheaders()}
                return Answer(response.status, body, known)


def _too_large() -> NoAnswer:
    return NoAnswer("too large", f"its answer is longer than {MOST_BYTES} bytes")


def _unsafe(text: str, without: str = "\n") -> bool:
    """Return whether ``text`` could end its part of a request, or cannot be sent."""
    return not (text.isascii() and text.isprintable()) or without in text


class MetadataService:
    """What the sources of all clouds share: a wire, and times moved to this host's clock.

    Times that a cloud announces are absolute. They are compared with this host's clock, which is
    trusted to within the skew that the answers' ``Date`` headers show (`skew_s`).
    """

    on_network = True
    pause_s: float | None = None

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._wire, self._clock = Wire(base_url, timeout_s), clock
        self._ahead_s = 0.0

    def start(self) -> bool:
        """Return true: there is a service to ask."""
        return True

    def interrupt(self) -> None:
        """End the poll in progress."""
        self._wire.interrupt()

    def close(self) -> None:
        """Do nothing: each request closes its connection."""

    def _on_host_clock(self, notice: Notice | None, answer: Answer) -> Notice | None:
        self._ahead_s = skew_s(self._ahead_s, answer.date_unix_s, self._clock())
        if notice is None or notice.leaves_unix_s is None or self._ahead_s == 0.0:
            return notice
        return replace(notice, leaves_unix_s=notice.leaves_unix_s - self._ahead_s)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``; raise NoAnswer if there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("garbage", f"its answer is no JSON: {body[:60]!r}") from error
    if not isinstance(value, dict):
        raise NoAnswer("garbage", f"its answer is no JSON object: {body[:60]!r}")
    return value


def plain_text(body: bytes) -> str:
    """Return ``body`` as one line of text without white space around it; else raise NoAnswer."""
    text = body.decode("utf-8", "replace").strip()
    if not text or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
        raise NoAnswer("garbage", f"its answer is no line of text: {body[:60]!r}")
    return text


def unexpected(status: int) -> NoAnswer:
    """Return the error for a status that says neither yes nor no."""
    return NoAnswer(f"status {status}", f"it answered with status {status}")
