"""Ask a metadata service over HTTP so that nothing it does can hold anybody up.

``urllib`` and ``http.client`` time out per read, so a server that sends a byte a second holds its
client for hours; and a thread in the midst of them cannot be called back. Here every wait is one
``poll`` on the socket and on a pipe, with one deadline for the whole exchange. Proxies are not used
and redirects not followed: a metadata service is on this machine's own link.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
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

    Args:
        base_url: ``http://`` and a host, with a port and a path if need be.
        timeout_s: how long an exchange may take in all, from the connection to the last byte.

    Raises:
        ConfigError: ``base_url`` is none that can be asked.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname or parts.query or _unsafe(base_url, " "):
            raise ConfigError(
                f"a metadata service was to be asked at {base_url!r}; possible is http:// with a "
                "host, a port and a path; change the address"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._netloc, self._prefix = parts.netloc, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._wake: tuple[int, int] | None = None

    def open(self) -> None:
        """Make the pipe by which `interrupt` reaches a request. May be called again."""
        if self._wake is None:
            self._wake = os.pipe()

    def interrupt(self) -> None:
        """Make the request in progress, and every later one, raise `Interrupted`."""
        if self._wake is not None:
            os.write(self._wake[1], b"x")

    def close(self) -> None:
        """Close the pipe, after the last request. May be called again."""
        wake, self._wake = self._wake, None
        for fd in wake or ():
            os.close(fd)

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> Answer:
        """Return the server's answer, whatever its status, unless it is a redirect.

        Args:
            method: ``GET`` or ``PUT``, always without a body.
            path: with its leading slash and its query.
            headers: to send, by name.
            timeout_s: instead of the usual limit.

        Raises:
            NoAnswer: there was none, or not in time, or one that is no HTTP, or a redirect.
            Interrupted: `interrupt` was called.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        request = self._request(method, path, headers)
        try:
            raw = self._exchange(request, _ExchangeDeadline(limit_s, self._wake))
        except OSError as error:
            raise NoAnswer("unreachable", f"it cannot be reached ({error})") from error
        answer = _parsed(raw, method)
        if 300 <= answer.status < 400:
            raise NoAnswer("redirect", f"it redirected elsewhere ({answer.status})")
        return answer

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        lines = {"Host": self._netloc, "Connection": "close", "Accept": "*/*", **headers}
        if method == "PUT":
            lines["Content-Length"] = "0"
        if _unsafe(path, " ") or any(_unsafe(value) for value in lines.values()):
            raise NoAnswer("garbage", "what it sent before cannot be sent back to it")
        fields = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{fields}\r\n".encode("ascii")

    def _exchange(self, request: bytes, deadline: _ExchangeDeadline) -> bytes:
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            failed = sock.connect_ex(address)
            if failed == errno.EINPROGRESS:
                deadline.wait(sock, select.POLLOUT)
                failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            while request:
                deadline.wait(sock, select.POLLOUT)
                request = request[sock.send(request) :]
            return _received(sock, deadline)


class _ExchangeDeadline:
    """The one limit of an exchange, and the pipe that ends it early."""

    def __init__(self, limit_s: float, wake: tuple[int, int] | None) -> None:
        self._limit_s, self._wake = limit_s, wake
        self._at_s = time.monotonic() + limit_s

    def wait(self, sock: socket.socket, event: int) -> None:
        poller = select.poll()
        poller.register(sock, event)
        if self._wake is not None:
            poller.register(self._wake[0], select.POLLIN)
        left_s = max(0.0, self._at_s - time.monotonic())
        ready = {fd for fd, _ in poller.poll(left_s * 1e3)}
        if self._wake is not None and self._wake[0] in ready:
            raise Interrupted
        if not ready:
            raise NoAnswer("timeout", f"it did not answer within {self._limit_s:g} s")


def _received(sock: socket.socket, deadline: _ExchangeDeadline) -> bytes:
    raw = bytearray()
    while not _complete(raw):
        deadline.wait(sock, select.POLLIN)
        piece = sock.recv(8192)
        if not piece:
            break
        raw += piece
        if len(raw) > MOST_BYTES:
            raise NoAnswer("too large", f"its answer is longer than {MOST_BYTES} bytes")
    return bytes(raw)


def _complete(raw: bytearray) -> bool:
    """Return whether the announced length is there, for servers that do not close."""
    head, end, body = bytes(raw).partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length:[ \t]*([0-9]{1,9})[ \t]*\r?$", head)
    return bool(end and length) and len(body) >= int(length[1] if length else 0)


class _Recorded:
    """What `HTTPResponse` needs of a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _parsed(raw: bytes, method: str) -> Answer:
    try:
        response = HTTPResponse(_Recorded(raw), method=method)  # type: ignore[arg-type]
        with response:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, response.read(), headers)
    except (HTTPException, ValueError) as error:
        raise NoAnswer("garbage", f"its answer is no HTTP ({error!r:.80})") from error


def _unsafe(text: str, without: str = "\n") -> bool:
    """Return whether ``text`` could end its part of a request, or cannot be sent."""
    return not (text.isascii() and text.isprintable()) or without in text


class MetadataService:
    """What the sources of all clouds share: a wire, and times moved to this host's clock.

    Times that a cloud announces are absolute. They are compared with this host's clock, which is
    trusted to within the skew that the answers' ``Date`` headers show (`skew_s`).

    Args:
        base_url: of the service; the default is the address all clouds use.
        timeout_s: how long an exchange may take.
        clock: seconds since 1970.
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
        """Make the wire interruptible."""
        self._wire.open()
        return True

    def interrupt(self) -> None:
        """End the poll in progress."""
        self._wire.interrupt()

    def close(self) -> None:
        """Close the wire."""
        self._wire.close()

    def _on_host_clock(self, notice: Notice | None, answer: Answer) -> Notice | None:
        self._ahead_s = skew_s(self._ahead_s, answer.date_unix_s, self._clock())
        if notice is None or notice.leaves_unix_s is None or self._ahead_s == 0.0:
            return notice
        return replace(notice, leaves_unix_s=notice.leaves_unix_s - self._ahead_s)
