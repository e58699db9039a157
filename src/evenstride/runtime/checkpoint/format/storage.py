"""Stores checkpoints, with the few operations that every file system and object store supports.

Files are not renamed or locked, because object stores cannot do that. Names are relative to the
checkpoints' folder, with ``/`` between a checkpoint's folder and its files.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from evenstride.errors import CheckpointError, ConfigError

_T = TypeVar("_T")

Bytes = bytes | bytearray | memoryview

# An operation is tried this many times, with pauses that double.
_TRIES, FIRST_PAUSE_S = 4, 0.5

# A retry does not help against these errors before the user has removed their cause.
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


class NotAFile(OSError):
    """The name belongs to a folder, a pipe, a device or a symbolic link instead of a file."""


# A storage raises these if the file does not exist. All other errors may be temporary.
NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotAFile)


def tried(
    call: Callable[[], _T],
    is_final: Callable[[Exception], bool],
    pause: Callable[[float], object] = time.sleep,
) -> _T:
    """Make a call, and retry it after errors that may be temporary; raise the last error."""
    pause_s = FIRST_PAUSE_S
    for _ in range(_TRIES - 1):
        try:
            return call()
        except Exception as error:
            if is_final(error):
                raise
        pause(pause_s)
        pause_s *= 2
    return call()


class Storage(Protocol):
    """A folder of files, on a disk or in an object store."""

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write or replace a file; it is durable when this returns.

        Raises:
            Exception: any; the file may then exist completely or in part.
        """

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``start`` on, fewer at the end; all if ``None``.

        Raises:
            FileNotFoundError: the file does not exist.
            NotAFile: the name does not belong to a regular file.
        """

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without its own; empty if the folder does not exist."""

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty and the store has folders."""

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""


class LocalStorage:
    """A folder of the file system; created by the first write.

    A file and its entry in the folder are on the disk when `write` returns. Symbolic links below
    the folder are not followed. Only regular files are opened, because a pipe would block forever.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        path = self._root / name
        self._make(path.parent)
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                _write_all(file.fileno(), memoryview(chunk))
            os.fsync(file.fileno())
        # fsync of the file does not cover its name, which is in the folder.
        _sync_folder(path.parent)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with self._open(name) as file:
            left = max(os.fstat(file.fileno()).st_size - start, 0)
            left = left if length is None else min(length, left)
            if not left:
                return b""
            file.seek(start)
            parts = []
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def list(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, name: str) -> None:
        folder, _, file = name.rpartition("/")
        # Relative to the open folder: a link could replace the folder of a path meanwhile.
        with contextlib.suppress(FileNotFoundError), self._opened(folder) as at:
            os.unlink(file, dir_fd=at)

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            (self._root / folder).rmdir()

    def exists(self, name: str) -> bool:
        return (self._root / name).is_file()

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Open a folder; one below the root must not be a link."""
        link = os.O_NOFOLLOW if folder else 0
        try:
            fd = os.open(self._root / folder, os.O_RDONLY | os.O_DIRECTORY | link)
        except NotADirectoryError as error:
            raise NotAFile(error.errno, f"{folder} is a file or a link, not a folder") from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, name: str) -> io.FileIO:
        folder, _, file = name.rpartition("/")
        with self._opened(folder) as at:
            # Opening a device can have side effects, so check before and after.
            if stat.S_ISREG(os.stat(file, dir_fd=at, follow_symlinks=False).st_mode):
                # Without O_NONBLOCK, a pipe that has replaced the file would block forever.
                fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
                opened = io.FileIO(fd)
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return opened
                opened.close()
        raise NotAFile(errno.EINVAL, f"{name} is not a regular file (a link, a folder, a pipe?)")

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


class PatientReader:
    """Reads a storage, and retries failed reads.

    A missing file is a result. Any other error may be temporary and says nothing about the
    checkpoint: it is raised after the last try, and the file does not count as damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return str(self._storage)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file; see `Storage.read`.

        Raises:
            CheckpointError: all tries have failed.
        """
        remedy = (
            "It may be intact, so no older checkpoint is restored. Make it readable and restart, "
            "or move this checkpoint to another folder to continue from the previous one"
        )
        call = partial(self._storage.read, name, start, length)
        return self._tried(f"{name} in {self} cannot be read", remedy, call)

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder.

        Raises:
            CheckpointError: all tries have failed.
        """
        remedy = "A run that starts from scratch could replace them. Make it readable, and restart"
        what = f"the checkpoints in {self} cannot be listed"
        return self._tried(what, remedy, partial(self._storage.list, folder))

    def _tried(self, what: str, remedy: str, call: Callable[[], _T]) -> _T:
        try:
            # A missing file is a result: a retry would not change it.
            return tried(call, lambda error: isinstance(error, NOT_THERE))
        except NOT_THERE:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{what} after {_TRIES} tries: {type(error).__name__}: {error}. "
                f"No file or state was restored, changed or deleted. {remedy}"
            ) from error


def _write_all(fd: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(fd, chunk) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems neither support nor need it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


class FsspecStorage:
    """A folder of an fsspec file system; ``url`` is the user's own, for messages.

    Object stores write files atomically; this code does not rely on that. Listings never come from
    a cache.
    """

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self._url = fs, root.rstrip("/"), url

    def __str__(self) -> str:
        return self._url

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        path = self._path(name)
        # Not every store has folders.
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
        if length == 0:
            return b""
        end = None if length is None else start + length
        return bytes(self._fs.cat_file(self._path(name), start=start, end=end))

    def list(self, folder: str = "") -> list[str]:
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
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(Exception):
            if not self.list(folder):
                self._fs.rmdir(self._path(folder))

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _give_up(file: Any) -> None:
    """Discard a partly written file: closing it would complete the upload."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True  # else the garbage collector would close it


def _open_remote(url: str) -> Storage:
    scheme = url.partition("://")[0]
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"checkpoints at {url} need fsspec, which is not installed; run pip install "
            "'evenstride[remote]', or use a path of the file system"
        ) from error
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"checkpoints cannot be stored at {url}: {error}; install the fsspec package for "
            f"{scheme}:// (s3fs, gcsfs, adlfs, ...), or use a path of the file system"
        ) from error
    return FsspecStorage(fs, root, url)


def location(folder: str | os.PathLike[str]) -> str:
    """Return an absolute path, or a URL with a scheme such as ``s3://``."""
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"checkpoints cannot be stored in {folder!r}; expected a path, or a URL such as "
            "s3://bucket/folder"
        )
    text = text.removeprefix("file://")
    return text if "://" in text else str(Path(text).expanduser().absolute())


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path or URL."""
    text = location(folder)
    if "://" not in text:
        path = Path(text)
        # Unlike a Path's methods, this returns False without permission; a save reports that.
        if os.path.isfile(path):  # noqa: PTH113
            raise ConfigError(
                f"checkpoints cannot be stored in {path}, which is a file; use a folder, which "
                "need not exist yet"
            )
        return LocalStorage(path)
    return _open_remote(text)


def lasting(error: BaseException) -> bool:
    """Return whether an error, such as a full disk, persists for more than a few seconds."""
    return isinstance(error, OSError) and error.errno in _LASTING
