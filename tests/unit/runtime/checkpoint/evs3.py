"""An fsspec file system for `object_store`, like s3fs for S3."""

from __future__ import annotations

import http.client
import io
import json
from typing import Any
from urllib.parse import quote

import fsspec  # type: ignore[import-untyped]


class Unavailable(OSError):
    """The store has answered 503."""


class _Upload(io.BytesIO):
    """A file that becomes one object when it is closed, unless it was discarded."""

    def __init__(self, fs: EvS3, path: str) -> None:
        super().__init__()
        self._fs, self._path, self._discarded = fs, path, False

    def discard(self) -> None:
        """Put nothing."""
        self._discarded = True

    def close(self) -> None:
        """Put the object."""
        if not self.closed and not self._discarded:
            body = self.getvalue()
            super().close()
            self._fs.ask("PUT", self._path, body)
        super().close()


class EvS3(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Objects of ``evs3://HOST:PORT/key``."""

    protocol: Any = "evs3"
    cachable = False

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Any = None,
        query: str = "",
    ) -> bytes:
        """Return the answer to one request."""
        host, _, key = self._strip_protocol(path).partition("/")
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            connection.request(method, f"/{quote(key)}{query}", body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status >= 300:
            raise Unavailable(f"{method} {key}: the store answers {answer.status}")
        return data

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        assert mode == "wb", "ranges are read by cat_file"
        return _Upload(self, path)

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        """Return a range of an object."""
        last = "" if end is None else str(end - 1)
        return self.ask("GET", path, headers={"Range": f"bytes={start or 0}-{last}"})

    def ls(self, path: str, detail: bool = True, **_kwargs: Any) -> list[Any]:
        """Return the emulated contents of a folder."""
        path = str(self._strip_protocol(path)).rstrip("/")
        host, _, folder = path.partition("/")
        keys = json.loads(self.ask("GET", host, query=f"/?prefix={quote(folder)}/"))
        inside = {key.removeprefix(f"{folder}/").partition("/")[0] for key in keys}
        if not inside:
            raise FileNotFoundError(path)
        names = sorted(f"{path}/{name}" for name in inside)
        if detail:
            return [{"name": name} for name in names]
        return names

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether the object exists."""
        try:
            self.ask("GET", path, headers={"Range": "bytes=0-0"})
        except FileNotFoundError:
            return False
        return True

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        self.ask("DELETE", path)


def register() -> None:
    """Register ``evs3://`` with fsspec."""
    fsspec.register_implementation("evs3", EvS3, clobber=True)
