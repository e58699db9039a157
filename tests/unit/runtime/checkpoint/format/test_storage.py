"""All kinds of storage behave alike, and locations that cannot be opened are refused."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import CheckpointError, ConfigError
from evenstride.runtime.checkpoint.format.storage import (
    LocalStorage,
    NotAFile,
    Storage,
    lasting,
    open_storage,
)
from tests.messages import raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage, Runs
from tests.unit.runtime.checkpoint.object_store import ObjectStore

fsspec = pytest.importorskip("fsspec")

KINDS = ["local", "file", "memory", "objects", "fake"]


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """One of each kind, empty."""
    from tests.unit.runtime.checkpoint import evs3

    match request.param:
        case "local":
            yield open_storage(tmp_path / "a" / "b")
        case "file":
            yield open_storage(f"file://{tmp_path}/c")
        case "memory":
            yield open_storage(f"memory://{tmp_path.name}")
            fsspec.filesystem("memory").store.clear()
        case "objects":
            evs3.register()
            with ObjectStore() as store:
                yield open_storage(f"evs3://{store.address}/bucket/run")
        case _:
            yield MemoryStorage()


def test_a_written_file_is_read_in_ranges(storage: Storage) -> None:
    storage.write("f/x", [b"0123", memoryview(b"456"), b"789"])

    assert storage.read("f/x") == b"0123456789"
    assert storage.read("f/x", 3) == b"3456789"
    assert storage.read("f/x", 3, 4) == b"3456"
    assert storage.read("f/x", 8, 10) == b"89"
    assert storage.read("f/x", 2, 0) == b""


def test_a_file_is_replaced(storage: Storage) -> None:
    storage.write("x", [b"long"])
    storage.write("x", [b"s"])

    assert storage.read("x") == b"s"


def test_names_are_listed_by_folder(storage: Storage) -> None:
    assert storage.list() == []
    assert storage.list("nowhere") == []

    for name in ("a/x", "a/y", "b/x", "c"):
        storage.write(name, [b"1"])

    assert storage.list() == ["a", "b", "c"]
    assert storage.list("a") == ["x", "y"]
    assert storage.list("b") == ["x"]


def test_a_folder_whose_only_file_has_its_name_is_listed(storage: Storage) -> None:
    storage.write("a/a", [b"1"])

    assert storage.list("a") == ["a"]


def test_files_and_empty_folders_are_deleted(storage: Storage) -> None:
    storage.write("a/x", [b"1"])
    storage.write("a/y", [b"1"])

    storage.delete("a/x")
    storage.delete("a/x")
    storage.delete_folder("a")

    assert storage.list() == ["a"]
    assert (storage.exists("a/x"), storage.exists("a/y")) == (False, True)
    storage.delete("a/y")
    storage.delete_folder("a")
    storage.delete_folder("a")
    assert storage.list() == []


def test_a_missing_file_cannot_be_read(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("a/x")
    with pytest.raises(FileNotFoundError):
        storage.read("a/x", 5, 1)


def test_an_upload_that_breaks_off_leaves_no_object() -> None:
    from tests.unit.runtime.checkpoint import evs3

    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    evs3.register()
    with ObjectStore() as store:
        storage = open_storage(f"evs3://{store.address}/bucket/run")
        with pytest.raises(ZeroDivisionError):
            storage.write("x", breaks())

        assert store.objects == {}


def test_a_local_file_is_on_the_disk_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr("os.fsync", note)

    LocalStorage(tmp_path / "root").write("folder/file", [b"1"])

    assert synced.index("file") < synced.index("folder", synced.index("file"))
    assert "root" in synced, "the folder's own entry"


def test_ranks_may_make_a_folder_at_the_same_time(tmp_path: Path) -> None:
    storage, failed = LocalStorage(tmp_path / "root"), list[Exception]()

    def write(number: int) -> None:
        try:
            storage.write(f"folder/{number}", [b"1"])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert len(storage.list("folder")) == 8


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run"])
def test_a_url_without_fsspec_names_the_extra(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with raises_message(ConfigError, "'evenstride[remote]'"):
        open_storage(url)


@pytest.mark.parametrize("url", ["nosuch://bucket/run"])
def test_a_scheme_that_fsspec_does_not_know_is_refused(url: str) -> None:
    with raises_message(ConfigError):
        open_storage(url)


@pytest.mark.parametrize("folder", ["", 3, b"bytes"])
def test_an_invalid_location_is_refused(folder: str) -> None:
    with raises_message(ConfigError, "URL"):
        open_storage(folder)


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (PermissionError(errno.EACCES, "no"), True),
        (TimeoutError("busy"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (ValueError("odd"), False),
    ],
)
def test_lasting_errors_differ_from_temporary_ones(error: Exception, stays: bool) -> None:
    assert lasting(error) == stays


def _put(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            (path.parent.parent / "outside").write_bytes(b"secret")
            path.symlink_to(path.parent.parent / "outside")
        case "loop":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder that is a link":
            (path.parent.parent / "there").mkdir()
            (path.parent.parent / "there" / path.name).write_bytes(b"secret")
            path.parent.rmdir()
            path.parent.symlink_to(path.parent.parent / "there")


@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "link", "loop", "device", "folder that is a link"]
)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "root" / "a").mkdir(parents=True)
    _put(kind, tmp_path / "root" / "a" / "x")

    with raises_message(NotAFile):
        storage.read("a/x")


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_bytes(b"mine")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "there")

    with pytest.raises(NotAFile):
        storage.delete("a/x")

    assert (tmp_path / "there" / "x").read_bytes() == b"mine"


def test_a_folder_of_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "there")
    storage = LocalStorage(tmp_path / "root")

    storage.write("a/x", [b"1"])

    assert storage.read("a/x") == b"1"


def test_a_failing_remote_store_does_not_count_as_one_without_a_manifest(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}"
    run = runs(url, every=2)
    run.train(2)
    run.checkpoint.close()
    fs = fsspec.filesystem("memory")
    ls, exists = fs.ls, fs.exists

    def refuse(path: str, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    # As in many file systems of fsspec, exists() returns False after any error.
    monkeypatch.setattr(type(fs), "exists", lambda *_, **__: False)
    monkeypatch.setattr(
        type(fs), "ls", lambda _, path, **more: (refuse if "step-" in path else ls)(path, **more)
    )
    with raises_message(CheckpointError, "PermissionError"):
        runs(url).restore()

    monkeypatch.setattr(type(fs), "ls", lambda _, path, **more: ls(path, **more))
    monkeypatch.setattr(type(fs), "exists", lambda _, path, **more: exists(path, **more))
    assert runs(url).restore() is not None
    fs.store.clear()
