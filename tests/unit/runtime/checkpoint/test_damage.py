"""Damage is found before anything is overwritten, named, and passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint import CheckpointError
from evenstride.runtime.checkpoint.codec import to_bytes
from evenstride.runtime.checkpoint.errors import CheckpointDamaged
from evenstride.runtime.checkpoint.manifest import (
    Digest,
    Name,
    decode,
    encode,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.tables import decode_table
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
def test_a_damaged_checkpoint_is_passed_over_by_name(
    runs: Runs, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    storage, names, weights = _saved(runs)
    _damage(storage, f"{names[-1]}/{file}", how)
    run = runs(storage)

    restored = run.restore()

    assert restored is not None
    assert (restored.step, restored.folder) == (2, names[0])
    assert run.weights() == weights[0]
    if (file, how) != ("manifest.json", "missing"):
        told = "its manifest" if file == "manifest.json" else f"{names[-1]}/{file}"
        assert f"checkpoint {names[-1]} is passed over: {told}" in caplog.text


def test_the_next_saves_clear_a_damaged_one_away(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    _damage(storage, f"{names[-1]}/tensors-00000.bin", "middle bit")
    run = runs(storage, every=2)
    run.restore()

    run.train(2)
    run.checkpoint.close()

    assert names[-1] not in storage.list()
    assert len(storage.checkpoints()) == 2


def test_if_all_are_damaged_nothing_is_restored_and_nothing_starts_anew(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    for name in names:
        _damage(storage, f"{name}/tensors-00000.bin", "middle bit")
    run = runs(storage)
    before = run.weights(), run.stride.state_dict()

    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in the store can be"):
        run.restore()

    assert (run.weights(), run.stride.state_dict()) == before


def test_a_store_that_cannot_be_listed_is_not_an_empty_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _, _ = _saved(runs)
    run = runs(storage)

    def fail(folder: str = "") -> list[str]:
        raise TimeoutError("busy")

    monkeypatch.setattr(storage, "list", fail)

    with pytest.raises(CheckpointError, match="cannot be listed: TimeoutError: busy"):
        run.restore()


def _forged(storage: MemoryStorage, folder: str, file: str, data: bytes) -> None:
    """Replace a file, and make the manifest right for it."""
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

    with pytest.raises(Exception, match="is not JSON as it must be"):
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


def test_a_table_that_is_right_is_read() -> None:
    table = decode_table(to_bytes({"tensors": {"t": TENSOR}, "items": {}}), {"f": 16})

    assert table.state_dict_metadata["t"].size == (4,)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", sorted(FORGED))
def test_a_table_that_does_not_fit_its_files_is_refused(how: str) -> None:
    data = to_bytes({"tensors": {"t": {**TENSOR, **FORGED[how]}}, "items": {}})

    with pytest.raises(CheckpointDamaged, match="the table of contents"):
        decode_table(data, {"f": 16})


@pytest.mark.parametrize(
    "plain", [[], None, {"tensors": {}}, {"tensors": [], "items": {}}, {"items": {"a": 1}}], ids=str
)
def test_a_table_that_is_none_is_refused(plain: object) -> None:
    with pytest.raises(CheckpointDamaged):
        decode_table(to_bytes(plain), {})


def test_a_checkpoint_of_another_format_is_refused_rather_than_passed_over(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    path = f"{names[-1]}/manifest.json"
    manifest = decode(storage.files[path])
    body = encode(manifest).partition(b"\n")[0].replace(b'{"format":1', b'{"format":9') + b"\n"
    digest = Digest()
    digest.update(body)
    storage.files[path] = body + to_bytes({"digest": digest.info().digest})

    with pytest.raises(ConfigError, match="has format 9"):
        runs(storage).restore()


def test_names_of_steps_are_not_taken_from_elsewhere(runs: Runs) -> None:
    storage, names, _ = _saved(runs)
    other = str(Name(99, "f" * 12, 0))
    for file in FILES:
        storage.files[f"{other}/{file}"] = storage.files[f"{names[-1]}/{file}"]

    restored = runs(storage).restore()

    assert restored is not None
    assert restored.folder == names[-1]
