"""Object stores and other remote file systems, through fsspec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.storage import Bytes, Storage


class FsspecStorage:
    """A folder of an fsspec file system.

    A file is there as a whole or not at all where the store works like that, as object stores
    do; nothing here relies on it. Listings are never taken from a cache.

    Args:
        fs: the file system, an ``fsspec.AbstractFileSystem``.
        root: path of the folder in it.
        url: as the user wrote it, for messages.
    """

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self._url = fs, root.rstrip("/"), url

    def __str__(self) -> str:
        return self._url

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file; it is in the store when this returns."""
        path = self._path(name)
        # Not every store knows folders.
        with contextlib.suppress(NotImplementedError):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        file = self._fs.open(path, "wb")
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            _give_up(file)
            raise
        file.close()

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file."""
        if length == 0:
            return b""
        end = None if length is None else start + length
        return bytes(self._fs.cat_file(self._path(name), start=start, end=end))

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder."""
        path = self._path(folder)
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        inside = {str(each).rstrip("/") for each in found}
        # Some stores list a folder's own marker as if it were in it.
        return sorted(each.rpartition("/")[2] for each in inside - {path})

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty, where the store knows folders."""
        with contextlib.suppress(Exception):
            if not self.list(folder):
                self._fs.rmdir(self._path(folder))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _give_up(file: Any) -> None:
    """Drop a file that is half written: to close it would complete the upload of what is there."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True  # the garbage collector would close it as well


def open_remote(url: str) -> Storage:
    """Return the storage of a URL.

    Raises:
        ConfigError: fsspec, or the package for the URL's scheme, is not installed.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"checkpoints at {url} need fsspec, which is not installed; run pip install "
            "'evenstride[remote]', or give a path of the file system"
        ) from error
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"checkpoints cannot be kept at {url}: {error}; install the fsspec package for "
            f"{scheme}:// (s3fs, gcsfs, adlfs, ...), or give a path of the file system"
        ) from error
    return FsspecStorage(fs, root, url)
