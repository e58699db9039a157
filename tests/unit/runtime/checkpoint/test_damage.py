"""Damaged checkpoints are detected before a restore overwrites state, named, and skipped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint import CheckpointError
from evenstride.runtime.checkpoint.format.manifest import (
    Digest,
    Name,
    decode,
    encode,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.format.retention import COMPLETED
from evenstride.runtime.checkpoint.format.state_codec import to_bytes
from evenstride.runtime.checkpoint.format.tensor_index import decode_table
from tests.faults.damages import sealed
from tests.messages import check_message, lines_with, raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage, Runs

FILES = ["tensors-00000.bin", "items-00000.jsonl", "metadata.json", "manifest.json"]


def _saved(runs: Runs) -> tuple[MemoryStorage, Sequence[str], list[list[list[float]]]]:
    storage = MemoryStorage()
    run = runs(storage, every=2)
    weights = []
    for _ in range(2):
        run.train(2)
        weights.append(run.weights())
    run.checkpoint.close()
    return storage, storage.checkpoints(), weights


def _damage(storage: MemoryStorage, name: str, how: str) -> None:
    data = bytearray(storage.files[name])
    match how:
        case "missing":
            del storage.files[name]
            return
        case "empty":
            data = bytearray()
        case "short":
            data = data[:-1]
        case "long":
            data += b"\0"
        case "first bit":
            data[0] ^= 1
        case "middle bit":
            data[len(data) // 2] ^= 128
        case "last bit":
            data[-1] ^= 1
    storage.files[name] = bytes(data)


@pytest.mark.parametrize(
    "how", ["missing", "empty", "short", "long", "first bit", "middle bit", "last bit"]
)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_skipped_by_name(
    runs: Runs, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    storage, names, weights = _saved(runs)
    _damage(storage, f"{names[-1]}/{file}", how)
    run = runs(storage)

    restored = run.restore()

    assert restored is not None
    assert (restored.step, restored.folder) == (2, names[0])
    assert run.weights() == weights[0]
    damage = f"{names[-1]}/{file}"
    if file == "manifest.json":
        damage = "it has no manifest" if how == "missing" else "its manifest"
    assert f"checkpoint {names[-1]} is skipped: {damage}" in caplog.text


def test_a_damaged_checkpoint_of_another_run_is_not_deleted(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    _damage(storage, f"{names[-1]}/manifest.json", "middle bit")
    before = dict(storage.files)
    run = runs(storage, every=2)
    run.restore()

    run.train(6)
    run.checkpoint.close()

    assert names[0] not in storage.list(), "the restored one goes in its time"
    kept = [name for name in before if name.startswith(names[-1])]
    assert {name: storage.files[name] for name in kept} == {name: before[name] for name in kept}
    assert len(storage.checkpoints()) == 3


def test_if_all_are_damaged_restore_raises(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    for name in names:
        _damage(storage, f"{name}/tensors-00000.bin", "middle bit")
    run = runs(storage)
    before = run.weights(), run.stride.state_dict()

    with raises_message(CheckpointError):
        run.restore()

    assert (run.weights(), run.stride.state_dict()) == before


@pytest.mark.parametrize("at", ["first", "middle", "line end", "digest", "last"])
def test_a_flipped_bit_in_every_manifest_refuses_to_start_from_scratch(runs: Runs, at: str) -> None:
    storage, names, _ = _saved(runs)
    del storage.files[COMPLETED]  # a folder of an earlier version has no such note
    for name in names:
        data = bytearray(storage.files[f"{name}/manifest.json"])
        line = data.index(b"\n")
        where = {"first": 0, "middle": line // 2, "line end": line, "digest": line + 14, "last": -1}
        data[where[at]] ^= 1
        storage.files[f"{name}/manifest.json"] = bytes(data)
    before, run = dict(storage.files), runs(storage, every=2)
    state = run.weights(), run.stride.state_dict()

    with raises_message(CheckpointDamaged) as e:
        run.restore()

    assert all(name in str(e.value) for name in names)
    assert (run.weights(), run.stride.state_dict()) == state
    assert storage.files == before
    run.train(6)  # as a script would that catches the error
    run.checkpoint.close()
    assert {name: storage.files.get(name) for name in before} == before


@pytest.mark.parametrize("how", ["missing", "empty", "short"])
def test_a_folder_without_its_manifests_is_not_a_new_one(runs: Runs, how: str) -> None:
    storage, names, _ = _saved(runs)
    for name in names:
        _damage(storage, f"{name}/manifest.json", how)

    with raises_message(CheckpointDamaged):
        runs(storage).restore()


def _note(folder: Path, how: str) -> None:
    note = folder / COMPLETED
    note.unlink()
    match how:
        case "empty":
            note.touch()
        case "damaged":
            note.write_bytes(b"\0\xff" * 99)
        case "a folder":
            note.mkdir()
        case "a dangling link":
            note.symlink_to("/nowhere")
        case "unreadable":
            note.touch(0)


NOTES = ["missing", "empty", "damaged", "a folder", "a dangling link", "unreadable"]


@pytest.mark.parametrize("how", NOTES)
def test_with_any_state_of_the_note_the_newest_checkpoint_is_restored(
    runs: Runs, tmp_path: Path, how: str
) -> None:
    kept = tmp_path / "kept"
    first = runs(kept, every=2)
    first.train(4)
    first.checkpoint.close()
    _note(kept, how)
    run = runs(kept, every=2, keep=1)

    restored = run.restore()

    assert restored is not None
    assert restored.step == 4
    run.train(4)
    run.checkpoint.close()
    assert [path.name[:14] for path in kept.glob("step-*")] == ["step-000000008"]


@pytest.mark.parametrize("to", ["a flipped bit", "half", "nothing"])
@pytest.mark.parametrize("how", NOTES)
def test_with_any_state_of_the_note_damaged_manifests_raise(
    runs: Runs, tmp_path: Path, how: str, to: str
) -> None:
    kept = tmp_path / "kept"
    first = runs(kept, every=2)
    first.train(4)
    first.checkpoint.close()
    for path in kept.glob("*/manifest.json"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if to != "a flipped bit":
            del data[len(data) // 2 if to == "half" else 0 :]
        path.write_bytes(data)
    _note(kept, how)

    with raises_message(CheckpointDamaged):
        runs(kept).restore()


def _resealed(storage: MemoryStorage, folder: str, **changes: Any) -> None:
    plain = json.loads(storage.files[f"{folder}/manifest.json"].partition(b"\n")[0])
    plain |= changes
    plain = {key: value for key, value in plain.items() if value is not None}
    storage.files[f"{folder}/manifest.json"] = sealed(plain)


def test_from_a_folder_of_an_earlier_version_only_the_restored_checkpoint_is_deleted(
    runs: Runs,
) -> None:
    storage, names, weights = _saved(runs)
    del storage.files[COMPLETED]
    for name in names:
        _resealed(storage, name, earlier=None, run=None)
    run = runs(storage, every=2, keep=1)

    restored = run.restore()

    assert restored is not None
    assert (restored.step, run.weights()) == (4, weights[-1])
    run.train(4)
    run.checkpoint.close()
    left = storage.checkpoints()
    assert names[0] in left
    assert names[1] not in left
    assert COMPLETED in storage.list()


def test_a_forged_list_does_not_delete_checkpoints_of_another_run(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    before = dict(storage.files)
    stranger = runs(storage, every=2)
    stranger.train(2)
    stranger.checkpoint.close()
    (newest,) = set(storage.checkpoints()) - set(names)
    _resealed(storage, newest, earlier=list(names))

    run = runs(storage, every=2, keep=1)
    restored = run.restore()
    run.train(8)
    run.checkpoint.close()

    assert restored is not None
    assert restored.folder == newest
    assert {name: storage.files.get(name) for name in before} == before
    assert newest not in storage.checkpoints()


def test_a_damaged_checkpoint_that_this_run_wrote_before_a_restart_stays(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    _damage(storage, f"{names[0]}/manifest.json", "middle bit")
    run = runs(storage, every=2, keep=1)
    run.restore()

    run.train(4)
    run.checkpoint.close()

    left = storage.checkpoints()
    assert names[0] in left, "its tensors may be intact, and nothing proves whose they are"
    assert names[1] not in left


def test_a_checkpoint_without_a_manifest_is_skipped_with_a_warning(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    storage, names, _ = _saved(runs)
    _damage(storage, f"{names[-1]}/manifest.json", "missing")

    runs(storage).restore()

    check_message(lines_with("\n".join(caplog.messages), "is skipped"), names[-1])


def test_a_run_that_does_not_restore_deletes_no_earlier_checkpoint(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    before = dict(storage.files)
    run = runs(storage, every=2, keep=1)

    run.train(6)
    run.checkpoint.close()

    assert {name: storage.files.get(name) for name in before} == before
    assert len(storage.checkpoints()) == len(names) + 1


def test_over_many_restarts_at_most_twice_keep_checkpoints_stay(runs: Runs) -> None:
    storage = MemoryStorage()
    for _ in range(6):
        run = runs(storage, every=2, keep=2)
        run.restore()
        run.train(2)
        run.checkpoint.close()
        run.close()
    assert len(storage.checkpoints()) == 4, "each life has saved one, fewer than are kept"

    run = runs(storage, every=2, keep=2)
    run.restore()
    run.train(4)
    run.checkpoint.close()

    assert [name[:14] for name in storage.checkpoints()] == ["step-000000014", "step-000000016"]


class Sick(MemoryStorage):
    """A store that fails a number of times to read a kind of file."""

    def __init__(self, files: dict[str, bytes], kind: str, error: OSError, times: int) -> None:
        super().__init__()
        self.files, self.kind, self.error, self.times = files, kind, error, times

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file, or fail."""
        if name.endswith(self.kind) and self.times:
            self.times -= 1
            raise self.error
        return super().read(name, start, length)


ERRORS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE]


@pytest.mark.parametrize("file", FILES)
def test_a_read_that_fails_temporarily_is_retried(runs: Runs, file: str) -> None:
    storage, _, weights = _saved(runs)
    run = runs(Sick(storage.files, file, OSError(errno.EIO, "sick"), 3))

    restored = run.restore()

    assert restored is not None
    assert restored.step == 4
    assert run.weights() == weights[-1]


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("file", FILES)
def test_an_unreadable_file_does_not_count_as_damaged(runs: Runs, file: str, number: int) -> None:
    storage, names, _ = _saved(runs)
    before = dict(storage.files)
    run = runs(Sick(storage.files, file, OSError(number, "sick"), 10**9), every=2, keep=1)

    with raises_message(CheckpointError, names[-1], file) as e:
        run.restore()

    assert not isinstance(e.value, CheckpointDamaged)
    run.train(6)
    run.checkpoint.close()
    assert {name: storage.files.get(name) for name in before} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("what", ["", "manifest.json", "tensors-00000.bin"])
def test_a_file_without_permission_does_not_count_as_damaged(
    runs: Runs, tmp_path: Path, what: str
) -> None:
    first = runs(tmp_path / "kept", every=2)
    first.train(4)
    first.checkpoint.close()
    names = sorted(path.name for path in (tmp_path / "kept").glob("step-*"))
    closed = tmp_path / "kept" / names[-1] / what
    closed.chmod(0)
    try:
        with pytest.raises(CheckpointError, match=r"after 4 tries: PermissionError"):
            runs(tmp_path / "kept").restore()
    finally:
        closed.chmod(0o700)

    restored = runs(tmp_path / "kept").restore()
    assert restored is not None
    assert restored.folder == names[-1]


def test_a_store_that_cannot_be_listed_is_not_an_empty_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _, _ = _saved(runs)
    run = runs(storage)

    def fail(folder: str = "") -> list[str]:
        raise TimeoutError("busy")

    monkeypatch.setattr(storage, "list", fail)

    with raises_message(CheckpointError, "TimeoutError"):
        run.restore()


def _forged(storage: MemoryStorage, folder: str, file: str, data: bytes) -> None:
    """Replace a file, and update the manifest."""
    name = parse_name(folder)
    assert name is not None
    manifest, digest = read_manifest(storage, name), Digest()
    digest.update(data)
    manifest.files[file] = digest.info()
    storage.files[f"{folder}/{file}"] = data
    storage.files[f"{folder}/manifest.json"] = encode(manifest)


@pytest.mark.parametrize("file", ["metadata.json", "items-00000.jsonl"])
def test_a_pickle_with_a_right_checksum_is_refused_and_runs_nothing(
    runs: Runs, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    storage, names, _ = _saved(runs)
    size_bytes = len(storage.files[f"{names[-1]}/{file}"])
    evil = b"cposix\nsystem\n(S'echo pwned'\ntR."
    _forged(storage, names[-1], file, evil + b" " * (size_bytes - len(evil)))
    run = runs(storage)
    before = run.weights()

    with raises_message(Exception, "JSON"):
        run.restore()

    assert "pwned" not in capfd.readouterr().out
    assert run.weights() == before


TENSOR: dict[str, Any] = {"dtype": "float32", "size": [4], "chunks": [[[0], [4], "f", 0]]}
FORGED: dict[str, dict[str, Any]] = {
    "too large": {"size": [2**40], "chunks": [[[0], [2**40], "f", 0]]},
    "beyond the file": {"chunks": [[[0], [4], "f", 1]]},
    "before the file": {"chunks": [[[0], [4], "f", -16]]},
    "a part missing": {"chunks": [[[0], [3], "f", 0]]},
    "a part outside": {"chunks": [[[2], [4], "f", 0]]},
    "another file": {"chunks": [[[0], [4], "../../secret", 0]]},
    "no such kind": {"dtype": "float33"},
    "no kind": {"dtype": ["float32"]},
    "a size of texts": {"size": ["4"]},
    "a negative size": {"size": [-4]},
    "dimensions that differ": {"chunks": [[[0, 0], [4, 1], "f", 0]]},
    "no parts": {"chunks": None},
    "huge numbers": {"size": [2**70], "chunks": [[[0], [2**70], "f", 0]]},
}


def test_a_valid_index_is_read() -> None:
    table = decode_table(to_bytes({"tensors": {"t": TENSOR}, "items": {}}), {"f": 16})

    assert table.state_dict_metadata["t"].size == (4,)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", sorted(FORGED))
def test_an_index_that_does_not_match_its_files_is_refused(how: str) -> None:
    data = to_bytes({"tensors": {"t": {**TENSOR, **FORGED[how]}}, "items": {}})

    with raises_message(CheckpointDamaged):
        decode_table(data, {"f": 16})


@pytest.mark.parametrize(
    "plain", [[], None, {"tensors": {}}, {"tensors": [], "items": {}}, {"items": {"a": 1}}], ids=str
)
def test_an_invalid_index_is_refused(plain: object) -> None:
    with pytest.raises(CheckpointDamaged):
        decode_table(to_bytes(plain), {})


def test_a_checkpoint_of_another_format_is_refused_and_not_skipped(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    path = f"{names[-1]}/manifest.json"
    manifest = decode(storage.files[path])
    body = encode(manifest).partition(b"\n")[0].replace(b'{"format":1', b'{"format":9') + b"\n"
    digest = Digest()
    digest.update(body)
    storage.files[path] = body + to_bytes({"digest": digest.info().digest})

    with raises_message(ConfigError):
        runs(storage).restore()


def test_names_with_another_step_are_refused(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    other = str(Name(99, "f" * 12, 0))
    for file in FILES:
        storage.files[f"{other}/{file}"] = storage.files[f"{names[-1]}/{file}"]

    restored = runs(storage).restore()

    assert restored is not None
    assert restored.folder == names[-1]
