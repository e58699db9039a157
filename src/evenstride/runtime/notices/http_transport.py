"""Sends HTTP requests to a metadata service, with one deadline each that always holds.

``urllib`` and ``http.client`` time out per read, so a server that sends a byte per second can block
its client for hours. Their reads cannot be interrupted either. Here a timer shuts the socket down
at the deadline of a request, and `Wire.interrupt` does so at once; the read in progress then fails.
Proxies are not used and redirects are not followed, because a metadata service is on this machine's
own link.
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

# The address of all three clouds' metadata services. It is numeric, because a name look-up has no
# timeout.
LINK_LOCAL = "http://169.254.169.254"
# Far more than any of these services sends.
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: the status, the body, and the headers by their names in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def date_unix_s(self) -> float | None:
        """The Unix time in the response's ``Date`` header; ``None`` without one."""
        return http_date_unix_s(self.headers.get("date", ""))


def http_date_unix_s(text: str) -> float | None:
    """Return the Unix time of ``Mon, 19 Sep 2016 18:29:47 GMT``; ``None`` if invalid."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


class Wire:
    """Sends requests to one server, one at a time, each on a new connection.

    ``timeout_s`` limits a request from the connection to the last byte.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname or parts.query or _unsafe(base_url, " "):
            raise ConfigError(
                f"invalid address {base_url!r} of a metadata service: expected http:// with a host "
                "and, if needed, a port and a path"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        # Held while the current exchange is replaced, so that an interrupt never misses one.
        self._lock = threading.Lock()
        self._exchange: _Exchange | None = None
        self._interrupted = False

    def interrupt(self) -> None:
        """Make the current request and all later ones raise `Interrupted`."""
        with self._lock:
            self._interrupted = True
            if self._exchange is not None:
                self._exchange.cut()

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> Answer:
        """Return the server's response of any status except redirects.

        ``method`` is GET or PUT, always without a body. Raises NoAnswer if no valid HTTP response
        arrives in time, or if it is a redirect. Raises Interrupted after `interrupt`.
        """
        if _unsafe(path, " ") or any(_unsafe(value) for value in headers.values()):
            raise NoAnswer("garbage", "its earlier response has characters that HTTP cannot send")
        exchange = self._begin(self._timeout_s if timeout_s is None else timeout_s)
        try:
            answer = exchange.run(method, self._prefix + path, headers)
        except NoAnswer:
            if self._interrupted:
                raise Interrupted from None
            raise
        if 300 <= answer.status < 400:
            raise NoAnswer("redirect", f"it sent a redirect (status {answer.status})")
        return answer

    def _begin(self, limit_s: float) -> _Exchange:
        exchange = _Exchange(self._host, self._port, limit_s)
        with self._lock:
            if self._interrupted:
                raise Interrupted
            self._exchange = exchange
        return exchange


class _Exchange:
    """One request and its response, within one time limit."""

    def __init__(self, host: str, port: int, limit_s: float) -> None:
        self._host = host
        self._port = port
        self._limit_s = limit_s
        self._socket: socket.socket | None = None
        self._cut = False

    def cut(self) -> None:
        """End the exchange; may be called from any thread."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not connected yet, or no longer
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        timer = threading.Timer(self._limit_s, self.cut)
        timer.daemon = True
        timer.start()
        try:
            return self._answer(method, path, headers)
        except (OSError, HTTPException, ValueError) as error:
            if self._cut or isinstance(error, TimeoutError):
                text = f"it did not respond within {self._limit_s:g} s"
                raise NoAnswer("timeout", text) from error
            if isinstance(error, LineTooLong):
                raise _too_large() from error
            # Before OSError: `RemoteDisconnected` inherits from both.
            if isinstance(error, HTTPException) or not isinstance(error, OSError):
                raise NoAnswer("garbage", f"its response is not HTTP ({error!r:.80})") from error
            raise NoAnswer("unreachable", f"it cannot be reached ({error})") from error
        finally:
            timer.cancel()

    def _answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )[0]
        connection = HTTPConnection(self._host, self._port)
        # Created here instead of by the connection, so that `cut` also ends the connection attempt.
        with socket.socket(family, kind, protocol) as sock:
            self._socket = sock
            sock.settimeout(self._limit_s)
            sock.connect(address)
            if self._cut:  # before there was a connection to shut down
                raise TimeoutError
            connection.sock = sock
            connection.request(method, path, headers={"Connection": "close", **headers})
            with connection.getresponse() as response:
                body = response.read(MOST_BYTES + 1)
                if self._cut:  # without a length, a cut body looks complete
                    raise TimeoutError
                if len(body) > MOST_BYTES:
                    raise _too_large()
                if response.length:
                    raise HTTPException(f"the last {response.length} bytes are missing")
                known = {name.lower(): value for name, value in response.getheaders()}
                return Answer(response.status, body, known)


def _too_large() -> NoAnswer:
    return NoAnswer("too large", f"its response is longer than {MOST_BYTES} bytes")


def _unsafe(text: str, without: str = "\n") -> bool:
    """Return whether ``text`` cannot be sent, or could inject something into a request."""
    return not (text.isascii() and text.isprintable()) or without in text


class MetadataService:
    """The common base of all clouds' sources: requests, and times converted to this host's clock.

    A cloud announces absolute times. They are corrected by the skew between the clocks, which is
    measured from the ``Date`` headers of the responses (`skew_s`).
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
        """Return true: there is a service to poll."""
        return True

    def interrupt(self) -> None:
        """End the current poll."""
        self._wire.interrupt()

    def close(self) -> None:
        """Do nothing: each request closes its connection."""

    def _on_host_clock(self, notice: Notice | None, answer: Answer) -> Notice | None:
        self._ahead_s = skew_s(self._ahead_s, answer.date_unix_s, self._clock())
        if notice is None or notice.leaves_unix_s is None or self._ahead_s == 0.0:
            return notice
        return replace(notice, leaves_unix_s=notice.leaves_unix_s - self._ahead_s)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``; raise NoAnswer if it is invalid."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("garbage", f"its response is not JSON: {body[:60]!r}") from error
    if not isinstance(value, dict):
        raise NoAnswer("garbage", f"its response is not a JSON object: {body[:60]!r}")
    return value


def plain_text(body: bytes) -> str:
    """Return ``body`` as one stripped line of text; raise NoAnswer if it is not."""
    text = body.decode("utf-8", "replace").strip()
    if not text or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
        raise NoAnswer("garbage", f"its response is not a line of text: {body[:60]!r}")
    return text


def unexpected(status: int) -> NoAnswer:
    """Return the error for an unexpected status."""
    return NoAnswer(f"status {status}", f"it responded with status {status}")
