"""Metadata services of three clouds and misbehaving servers: real HTTP, on this machine only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.free_ports import free_ports

TTL, TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: Any


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Served:
    """A running server: its address and all received requests."""

    url: str
    asked: list[Asked] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [f"{asked.method} {asked.path}" for asked in self.asked]


@contextmanager
def served(reply: Callable[[Asked], Reply]) -> Iterator[Served]:
    """Serve ``reply`` on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            asked = Asked(self.command, parts.path, query, self.headers)
            there.asked.append(asked)
            answer = reply(asked)
            self.send_response_only(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_PUT = do_POST = _answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the client left, as it may

    server = Server(("127.0.0.1", 0), Handler)
    there = Served(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield there
    finally:
        if isinstance(reply, FakeGcp):
            reply.stop()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def raw_server(pieces: Iterable[bytes] | None, *, closes: bool = True) -> Iterator[str]:
    """Serve bytes that need not be HTTP, then close; with ``None``, accept and never respond."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                held.append(connection)
                if pieces is not None:
                    connection.recv(65536)
                    try:
                        for piece in pieces:
                            connection.sendall(piece)
                    except OSError:
                        pass  # the client has seen enough
                    if closes:
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def closed_port() -> str:
    """Return an address without a server."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@dataclass
class FakeAws:
    """IMDSv2: requests need a token; a token can be made to expire."""

    action: bytes | None = None
    rebalance: bytes | None = None
    date_unix_s: float | None = None
    ttl_s: int | None = None
    tokens: list[str] = field(default_factory=list)
    valid: set[str] = field(default_factory=set)

    def __call__(self, asked: Asked) -> Reply:
        dated = {} if self.date_unix_s is None else {"Date": formatdate(self.date_unix_s)}
        if asked.path == "/latest/api/token":
            if asked.method != "PUT" or not 1 <= int(asked.headers[TTL] or "0") <= 21600:
                return Reply(400)
            self.tokens.append(f"token-{len(self.tokens)}==")
            self.valid.add(self.tokens[-1])
            ttl = asked.headers[TTL] if self.ttl_s is None else str(self.ttl_s)
            return Reply(200, self.tokens[-1].encode(), {TTL: ttl, **dated})
        if asked.headers[TOKEN] not in self.valid:
            return Reply(401)
        body = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(asked.path)
        return Reply(404, b"<html>Not Found</html>") if body is None else Reply(200, body, dated)


class FakeGcp:
    """The metadata server: two keys, versions, and requests that wait for a change."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._versions = dict.fromkeys(self._values, 1)
        self._stopped = False
        self.waiting = threading.Semaphore(0)
        self.failing = False

    def turn(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._versions[key] += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def __call__(self, asked: Asked) -> Reply:
        key = asked.path.removeprefix("/computeMetadata/v1/instance/")
        if asked.headers["Metadata-Flavor"] != "Google":
            return Reply(403)
        if self.failing:
            return Reply(503)
        with self._changed:
            if asked.query.get("wait_for_change") == "true":
                last = asked.query.get("last_etag", "0")
                if last == str(self._versions[key]):
                    self.waiting.release()
                self._changed.wait_for(
                    lambda: self._stopped or last != str(self._versions[key]),
                    float(asked.query["timeout_sec"]),
                )
            version = str(self._versions[key])
            return Reply(200, self._values[key].encode(), {"ETag": version})


@dataclass
class FakeAzure:
    """Scheduled Events and the name of the VM."""

    name: str = "worker_3"
    events: bytes = b'{"DocumentIncarnation": 1, "Events": []}'
    date_unix_s: float | None = None

    def __call__(self, asked: Asked) -> Reply:
        dated = {} if self.date_unix_s is None else {"Date": formatdate(self.date_unix_s)}
        if asked.headers["Metadata"] != "true" or "api-version" not in asked.query:
            return Reply(400, b'{"error": "Bad request"}')
        if asked.path == "/metadata/instance/compute/name":
            return Reply(200, self.name.encode()) if self.name else Reply(404)
        if asked.path == "/metadata/scheduledevents" and asked.method == "GET":
            return Reply(200, self.events, dated)
        return Reply(405)
