"""Manifests are accepted only if they are intact, and names only if they are checkpoints'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FORMAT,
    METADATA,
    Digest,
    FileInfo,
    Manifest,
    Name,
    check_file,
    decode,
    encode,
    is_our_file,
    items_file,
    parse_name,
    read_manifest,
    tensors_file,
)
from evenstride.runtime.loading.position import POSITION_VERSION
from tests.messages import check_message, raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage

POSITION: dict[str, Any] = {
    "version": POSITION_VERSION,
    **dict.fromkeys(("seed", "epoch", "position", "step"), 0),
    **dict.fromkeys(("global_batch", "length"), 4),
    **dict.fromkeys(("shuffle", "drop_last", "by_epoch"), False),
    "parts": [],
    "parts_end": 0,
    "shards": "",
    "left": None,
}
FILES = {METADATA: FileInfo(3, "f" * 32)}
MANIFEST = Manifest(FORMAT, 7, 1.5, 3, {"torch": "2"}, POSITION, {"length": 4}, {}, FILES, ("a",))
WHOLE = encode(MANIFEST)


def test_a_manifest_comes_back() -> None:
    assert decode(WHOLE) == MANIFEST


@pytest.mark.parametrize("at", range(len(WHOLE)))
def test_any_flipped_bit_is_noticed(at: int) -> None:
    for bit in (0, 3, 7):
        flipped = bytearray(WHOLE)
        flipped[at] ^= 1 << bit
        with pytest.raises(CheckpointDamaged):
            decode(bytes(flipped))


@pytest.mark.parametrize("end", range(len(WHOLE)))
def test_the_beginning_of_a_manifest_is_refused(end: int) -> None:
    with pytest.raises(CheckpointDamaged):
        decode(WHOLE[:end])


def test_a_manifest_with_further_bytes_is_refused() -> None:
    with pytest.raises(CheckpointDamaged):
        decode(WHOLE + b"\n")


def test_another_format_is_refused_and_not_reported_as_damage() -> None:
    with raises_message(ConfigError, FORMAT):
        decode(encode(replace(MANIFEST, format=9)))


def test_a_manifest_of_another_step_is_refused() -> None:
    storage = MemoryStorage()
    storage.write(f"{Name(8, '00000000000a', 0)}/manifest.json", [WHOLE])

    with raises_message(CheckpointDamaged, "step 7"):
        read_manifest(storage, Name(8, "00000000000a", 0))


@given(
    step=st.integers(0, 10**12),
    generation=st.integers(0, 2**48 - 1),
    attempt=st.integers(0, 10**6),
)
def test_names_come_back(step: int, generation: int, attempt: int) -> None:
    name = Name(step, f"{generation:012x}", attempt)

    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "step-12-00000000000a-0",
        "step-000000012",
        "step-000000012-00000000000A-0",
        "probe-0",
        "",
        ".git",
        "step-000000012-00000000000a-0.bak",
        "xstep-000000012-00000000000a-0",
        "step-000000012-00000000000a-0\n",
    ],
)
def test_names_of_other_folders_are_not_parsed(text: str) -> None:
    assert parse_name(text) is None


def test_names_are_ordered_by_run_and_step() -> None:
    a, b = "00000000000a", "00000000000b"
    names = [Name(9, a, 0), Name(1, b, 0), Name(1, b, 2), Name(1, b, 10), Name(2, b, 0)]

    assert sorted([names[3], names[1], names[4], names[0], names[2]]) == names


def test_own_files_are_recognised_by_name() -> None:
    ours = ["manifest.json", "metadata.json", tensors_file(3), items_file(123456)]

    assert all(map(is_our_file, ours))
    assert not any(map(is_our_file, ["notes.txt", "model.pt", "tensors-1.bin", "manifest.json~"]))


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 5])
def test_a_damaged_file_is_reported_with_its_damage(size_bytes: int) -> None:
    storage, data, digest = MemoryStorage(), bytes(size_bytes), Digest()
    digest.update(data)
    info = digest.info()
    storage.write("f", [data])

    assert check_file(storage, "f", info) is None
    storage.write("f", [data + b"x"])
    assert "more than" in (check_file(storage, "f", info) or "")
    storage.delete("f")
    assert check_file(storage, "f", info) == "f is missing"
    if size_bytes:
        storage.write("f", [data[:-1]])
        assert f"{size_bytes - 1} bytes, but {size_bytes} were" in (
            check_file(storage, "f", info) or ""
        )
        storage.write("f", [data[:-1] + b"\1"])
        check_message(check_file(storage, "f", info))
