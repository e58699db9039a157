"""Where checkpoints are kept: a few operations that any file system and object store has.

Nothing is renamed and nothing locked, as object stores can do neither. Names are relative to the
checkpoints' folder, with ``/`` between a checkpoint's folder and its files.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from evenstride.errors import ConfigError

Bytes = bytes | bytearray | memoryview

# Trying again does not help before somebody has done something about it.
_LASTING = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class Storage(Protocol):
    """A folder of files, on a disk or in an object store."""

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file, replacing what is there; it is durable when this returns.

        Raises:
            Exception: any; there may be a part of the file then, or all of it.
        """
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``start`` on, fewer at the end; all if ``None``.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without its own; empty if there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty, where the store knows folders at all."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        ...


class LocalStorage:
    """A folder of the file system; made when first written to.

    A file, and its entry in the folder, are on the disk when `write` returns.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file and wait until it is on the disk."""
        path = self._root / name
        self._make(path.parent)
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                _write_all(file.fileno(), memoryview(chunk))
            os.fsync(file.fileno())
        _sync_folder(path.parent)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file."""
        with (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            if length is None:
                return file.readall()
            parts = []
            while length > 0 and (part := file.read(length)):
                parts.append(part)
                length -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder."""
        try:
            return sorted(os.listdir(self._root / folder))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        (self._root / name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty."""
        with contextlib.suppress(OSError):
            (self._root / folder).rmdir()

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self._root / name).is_file()

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _write_all(fd: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(fd, chunk) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot, and have no need to
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path, or of a URL with a scheme such as ``s3://``.

    Raises:
        ConfigError: it is neither, or a file; or a URL needs fsspec, which is not installed, or
            the store's own package.
    """
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"checkpoints cannot be kept in {folder!r}; give a path, or a URL such as "
            "s3://bucket/folder"
        )
    text = text.removeprefix("file://")
    if "://" not in text:
        path = Path(text).expanduser().absolute()
        # Unlike a Path's methods, this says no where it may not look: every save will tell.
        if os.path.isfile(path):  # noqa: PTH113
            raise ConfigError(
                f"checkpoints cannot be kept in {path}, which is a file; give a folder, which is "
                "made if it is not there"
            )
        return LocalStorage(path)
    from evenstride.runtime.checkpoint.remote import open_remote

    return open_remote(text)


def lasting(error: BaseException) -> bool:
    """Return whether an error will still be there in a few seconds, such as a full disk."""
    return isinstance(error, OSError) and error.errno in _LASTING
