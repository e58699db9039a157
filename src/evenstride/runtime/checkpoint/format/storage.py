"""Where checkpoints are kept: a few operations that any file system and object store has.

Nothing is renamed and nothing locked, as object stores can do neither. Names are relative to the
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

# A storage that fails gets time: this many tries, with a pause that doubles.
_TRIES, FIRST_PAUSE_S = 4, 0.5

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


class NotAFile(OSError):
    """A file's name belongs to something else: a folder, a pipe, a device or a symbolic link."""


# Errors of a storage that say that there is no such file. All others may pass.
NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotAFile)


def tried(
    call: Callable[[], _T],
    is_final: Callable[[Exception], bool],
    pause: Callable[[float], object] = time.sleep,
) -> _T:
    """Make a call, again after a pause where it raises an error that may pass; raise the last."""
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
        """Write a file, replacing what is there; it is durable when this returns.

        Raises:
            Exception: any; there may be a part of the file then, or all of it.
        """

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return ``length`` bytes from ``start`` on, fewer at the end; all if ``None``.

        Raises:
            FileNotFoundError: there is no such file.
            NotAFile: there is something else of that name.
        """

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without its own; empty if there is no such folder."""

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder if it is empty, where the store knows folders at all."""

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""


class LocalStorage:
    """A folder of the file system; made when first written to.

    A file, and its entry in the folder, are on the disk when `write` returns. Symbolic links below
    the folder are not followed, and only regular files are opened: a pipe would block for ever.
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
        # The name is in the folder, which fsync of the file does not cover.
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
        # By the open folder: a path could lead through a link that replaced the folder meanwhile.
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
            # Opening a device can have effects, so look before and after.
            if stat.S_ISREG(os.stat(file, dir_fd=at, follow_symlinks=False).st_mode):
                # Without O_NONBLOCK a pipe that has replaced the file would block for ever.
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
    """Reads a storage, and tries again where it fails.

    A file that is not there is an answer. Any other error may pass, and tells nothing about the
    checkpoint: it is raised after the last try, and the file does not count as damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return str(self._storage)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file; see `Storage.read`.

        Raises:
            CheckpointError: it cannot be read now.
        """
        remedy = (
            "It may be undamaged, so no older checkpoint is restored. Make it readable and start "
            "again, or move this checkpoint to another folder to go on from the one before"
        )
        call = partial(self._storage.read, name, start, length)
        return self._tried(f"{name} in {self} cannot be read", remedy, call)

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder.

        Raises:
            CheckpointError: it cannot be listed now.
        """
        remedy = (
            "A run that starts from scratch might replace them. Make it readable, and start again"
        )
        what = f"the checkpoints in {self} cannot be listed"
        return self._tried(what, remedy, partial(self._storage.list, folder))

    def _tried(self, what: str, remedy: str, call: Callable[[], _T]) -> _T:
        try:
            # That a file is not there is an answer, which would be the same at the next try.
            return tried(call, lambda error: isinstance(error, NOT_THERE))
        except NOT_THERE:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{what}: {type(error).__name__}: {error}. It was tried {_TRIES} times. "
                f"Nothing was restored, changed or deleted. {remedy}"
            ) from error


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


class FsspecStorage:
    """A folder of an fsspec file system; ``url`` is as the user wrote it, for messages.

    A file is there as a whole or not at all where the store works like that, as object stores do;
    nothing here relies on it. Listings are never taken from a cache.
    """

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self._url = fs, root.rstrip("/"), url

    def __str__(self) -> str:
        return self._url

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
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
    """Drop a file that is half written: to close it would complete the upload of what is there."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True  # the garbage collector would close it as well


def _open_remote(url: str) -> Storage:
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


def location(folder: str | os.PathLike[str]) -> str:
    """Return an absolute path, or a URL with a scheme such as ``s3://``."""
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"checkpoints cannot be kept in {folder!r}; give a path, or a URL such as "
            "s3://bucket/folder"
        )
    text = text.removeprefix("file://")
    return text if "://" in text else str(Path(text).expanduser().absolute())


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path or URL."""
    text = location(folder)
    if "://" not in text:
        path = Path(text)
        # Unlike a Path's methods, this says no where it may not look: every save will tell.
        if os.path.isfile(path):  # noqa: PTH113
            raise ConfigError(
                f"checkpoints cannot be kept in {path}, which is a file; give a folder, which is "
                "made if it is not there"
            )
        return LocalStorage(path)
    return _open_remote(text)


def lasting(error: BaseException) -> bool:
    """Return whether an error will still be there in a few seconds, such as a full disk."""
    return isinstance(error, OSError) and error.errno in _LASTING
