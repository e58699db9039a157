"""A small object store on loopback, with faults on request, to test against.

It has the common features of S3 and similar stores: atomic writes of objects, reads of ranges,
listing by prefix, deletion. It has no folders and no renaming.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

Fault = str
"""What happens to a request: ``503``; ``reset`` (the connection breaks in the midst of the body);
``lost`` (the object is stored, and the connection breaks before the answer); ``held`` (the answer
waits until `ObjectStore.let_go` is called)."""


class ObjectStore:
    """Objects in memory behind HTTP on a free port of 127.0.0.1; a context manager.

    ``PUT`` and ``GET /key`` (with ``Range: bytes=a-b``), ``DELETE /key``, and
    ``GET /?prefix=p/`` for a JSON list of the keys with this prefix.

    Args:
        fault: called for every request with its number among those of its method, from 0 on, its
            method and its key; returns the fault, or ``None``.
    """

    def __init__(self, fault: Callable[[int, str, str], Fault | None] | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault = fault or (lambda *_: None)
        self.counts: dict[str, int] = {}
        self._lock, self._go = threading.Lock(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="evenstride-store", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def let_go(self) -> None:
        """Answer the held requests and all later ones."""
        self._go.set()

    def close(self) -> None:
        """Stop serving."""
        self._go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def next_fault(self, method: str, key: str) -> Fault | None:
        """Count a request, and return its fault."""
        with self._lock:
            number = self.counts.get(method, 0)
            self.counts[method] = number + 1
            return self.fault(number, method, key)

    def wait(self) -> None:
        """Wait until held requests are released."""
        self._go.wait()


def _handler_of(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        objects = store

    return Handler


class _Handler(BaseHTTPRequestHandler):
    objects: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:  # the base class looks for this name
        key, fault = self._begin("PUT")
        length = int(self.headers["Content-Length"])
        if fault == "reset":
            self.rfile.read(length // 2)
            self._break()
            return
        body = self.rfile.read(length)
        if fault == "503":
            self._answer(503)
            return
        if fault == "held":
            self.objects.wait()
        self.objects.objects[key] = body
        if fault == "lost":
            self._break()
        else:
            self._answer(200)

    def do_GET(self) -> None:
        key, fault = self._begin("GET")
        if fault is not None:
            self._fail(fault)
        elif not key:
            prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
            keys = sorted(each for each in self.objects.objects if each.startswith(prefix))
            self._answer(200, json.dumps(keys).encode())
        elif key not in self.objects.objects:
            self._answer(404)
        else:
            self._answer(200, self._ranged(self.objects.objects[key]))

    def do_DELETE(self) -> None:
        key, fault = self._begin("DELETE")
        if fault is not None:
            self._fail(fault)
        else:
            self._answer(204 if self.objects.objects.pop(key, None) is not None else 404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log no messages."""

    def _begin(self, method: str) -> tuple[str, Fault | None]:
        key = unquote(urlsplit(self.path).path.lstrip("/"))
        return key, self.objects.next_fault(method, key)

    def _ranged(self, data: bytes) -> bytes:
        asked = self.headers.get("Range")
        if asked is None:
            return data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return data[int(first) : int(last) + 1 if last else None]

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, fault: Fault) -> None:
        if fault == "503":
            self._answer(503)
        else:
            self._break()

    def _break(self) -> None:
        """Reset the connection, so that the other side gets an error at once."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()
