"""A checkpoint with correct digests and invalid content is refused before any state changes."""

from __future__ import annotations

import contextlib
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint.format.manifest import Digest, PositionSchema, decode
from evenstride.runtime.checkpoint.format.state_codec import from_bytes, to_bytes, unpack
from evenstride.runtime.checkpoint.format.tensor_index import decode_table
from tests.faults.damages import DEEP, ODD, mutated, sealed
from tests.messages import raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage, Runs, Solo

Change = Callable[[Any], Any]


@pytest.fixture
def kept(runs: Runs) -> tuple[MemoryStorage, str]:
    """A store with one checkpoint in mid-epoch, and its name."""
    storage = MemoryStorage()
    run = runs(storage, every=2)
    run.train(2)
    run.checkpoint.close()
    return storage, storage.checkpoints()[0]


def _manifest(storage: MemoryStorage, name: str) -> Any:
    return json.loads(storage.files[f"{name}/manifest.json"].partition(b"\n")[0])


def _forge(storage: MemoryStorage, name: str, file: str, data: bytes) -> None:
    manifest, whole = _manifest(storage, name), Digest()
    whole.update(data)
    info = whole.info()
    manifest["files"][file] = {"size_bytes": info.size_bytes, "digest": info.digest}
    storage.files[f"{name}/{file}"] = data
    storage.files[f"{name}/manifest.json"] = sealed(manifest)


def _refused(run: Solo, match: str | None = None) -> None:
    before = run.weights(), run.optimizer.state_dict(), run.stride.state_dict()
    with pytest.raises(CheckpointDamaged, match=match):
        run.restore()
    assert (run.weights(), run.optimizer.state_dict(), run.stride.state_dict()) == before


def _paths(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = plain.items() if isinstance(plain, dict) else ()
    return [path] * bool(path) + [p for k, v in inside for p in _paths(v, (*path, k))]


def _with(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    return {**plain, path[0]: _with(plain[path[0]], path[1:], value)}


def _kind(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def test_a_wrong_type_in_any_field_of_a_manifest_is_refused(
    kept: tuple[MemoryStorage, str],
) -> None:
    plain = _manifest(*kept)
    decode(sealed(plain))
    tried = 0
    for path in _paths(plain):
        own = plain
        for key in path:
            own = own[key]
        for odd in [*ODD, {"a": {}}]:
            optional = (path[-1] == "left" and odd is None) or (own == {} and odd in ({}, [[]]))
            if optional or _kind(odd) == _kind(own) or (path[-1] == "losses" and odd is None):
                continue
            forged = sealed(_with(plain, path, odd))
            with pytest.raises((CheckpointDamaged, ConfigError)) as error:
                decode(forged)
            other_version = path[-1] in ("format", "version") and _kind(odd) == "number"
            assert other_version or error.type is CheckpointDamaged, (path, odd)
            tried += 1
    assert tried > 300


def _left(rest: Any) -> Any:
    return {"begun": 0, "rest": rest, "open": []}


INFO = {"size_bytes": 1, "digest": "0" * 32}
VALUES: dict[str, tuple[tuple[str, ...], Any]] = {
    "a negative position": (("stride", "position"), -100),
    "a position beyond the data": (("stride", "position"), 41),
    "a huge position": (("stride", "position"), 2**63),
    "a negative step": (("stride", "step"), -1),
    "no batch": (("stride", "global_batch"), 0),
    "a negative length": (("stride", "length"), -1),
    "a batch of 0 before": (("stride", "batches"), [[0, 0]]),
    "negative parts": (("stride", "parts"), [-1]),
    "parts beyond the position": (("stride", "parts_end"), 41),
    "a range outside of the data": (("stride", "left"), _left([[0, 99]])),
    "overlapping ranges": (("stride", "left"), _left([[0, 9], [5, 12]])),
    "a reversed range": (("stride", "left"), _left([[9, 3]])),
    "files of ranks that do not exist": (("files", "tensors-00007.bin"), INFO),
    "no ranks": (("world_size",), 0),
    "an invalid time": (("created_unix_s",), float("inf")),
    "files beyond the folder": (("files", "../../etc/passwd"), INFO),
    "files of the system": (("files", "/etc/passwd"), INFO),
    "another checkpoint's file": (("files", "../step-1/tensors-00000.bin"), INFO),
    "a file of another kind": (("files", "model.pt"), INFO),
    "a manifest of itself": (("files", "manifest.json"), INFO),
    "a name with a line end": (("files", "metadata.json\n"), INFO),
    "a size below 0": (("files", "metadata.json", "size_bytes"), -1),
    "a huge size": (("files", "metadata.json", "size_bytes"), 2**63),
    "an invalid digest": (("files", "metadata.json", "digest"), "../x"),
    "a worker without a host": (("workers", "profiles"), [{"host": ["x"]}]),
    "invalid losses": (("workers", "losses"), {"failures": -1, "expected": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(VALUES))
def test_a_manifest_with_an_invalid_value_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str], what: str
) -> None:
    storage, name = kept
    path, value = VALUES[what]
    plain = _manifest(storage, name)
    plain["files"].setdefault(path[-1], {}) if path[0] == "files" else None
    plain["stride"].setdefault("batches", [[0, 4]])
    if what != "files of ranks that do not exist":
        plain["world_size"] = 9  # so that the number of files is not the reason
    storage.files[f"{name}/manifest.json"] = sealed(_with(plain, path, value))

    _refused(runs(storage), f"checkpoint {name} has correct digests, but was .*: its manifest ")


def test_a_manifest_without_an_index_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str]
) -> None:
    storage, name = kept
    plain = _manifest(storage, name)
    del plain["files"]["metadata.json"]
    storage.files[f"{name}/manifest.json"] = sealed(plain)

    _refused(runs(storage), "does not list metadata.json")


def test_further_fields_of_a_later_version_are_ignored(
    runs: Runs, kept: tuple[MemoryStorage, str]
) -> None:
    storage, name = kept
    plain = _manifest(storage, name)
    plain["later"] = plain["stride"]["later"] = plain["workers"]["later"] = {"a": [1]}
    storage.files[f"{name}/manifest.json"] = sealed(plain)

    assert runs(storage).restore() is not None


def test_a_huge_manifest_is_not_read_completely(
    runs: Runs, kept: tuple[MemoryStorage, str]
) -> None:
    storage, _ = kept
    limit, asked = 64 << 20, list[int | None]()
    read = storage.read

    def noted(name: str, start: int = 0, length: int | None = None) -> bytes:
        asked.append(length)
        return bytes(limit + 1) if name.endswith("manifest.json") else read(name, start, length)

    storage.read = noted  # type: ignore[method-assign]

    _refused(runs(storage), f"its manifest has more than {limit} bytes")
    assert all(length is not None and length <= limit + 1 for length in asked)


@pytest.mark.parametrize("file", ["manifest.json", "metadata.json", "items-00000.jsonl"])
@pytest.mark.parametrize("data", [DEEP, "NaN", "1e999", "9" * 5000, "[", "null", '""', "\0", "[]"])
def test_unusual_json_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str], file: str, data: str
) -> None:
    storage, name = kept
    if file == "manifest.json":
        body = data.encode() + b"\n"
        whole = Digest()
        whole.update(body)
        storage.files[f"{name}/{file}"] = body + to_bytes({"digest": whole.info().digest})
    elif file == "metadata.json":
        _forge(storage, name, file, data.encode())
    else:
        table = json.loads(storage.files[f"{name}/metadata.json"])
        table["items"]["model"] = [file, 0, len(data)]
        rest = {key: place for key, place in table["items"].items() if key != "model"}
        old, at = storage.files[f"{name}/{file}"], len(data)
        whole_items = data.encode()
        for key, (_, start, size) in rest.items():
            whole_items += old[start : start + size]
            table["items"][key] = [file, at, size]
            at += size
        _forge(storage, name, file, whole_items)
        _forge(storage, name, "metadata.json", to_bytes(table))

    _refused(runs(storage))


def test_deep_nesting_within_what_json_allows_is_refused_when_it_is_unpacked() -> None:
    plain: Any = 1
    for _ in range(100_000):
        plain = [plain]

    with raises_message(CheckpointDamaged):
        unpack(plain, {})


TENSOR = {"dtype": "float32", "size": [4], "chunks": [[[0], [4], "f", 0]]}
TABLES: dict[str, dict[str, Any]] = {
    "half covered": {"t": {**TENSOR, "chunks": [[[0], [2], "f", 0], [[0], [2], "f", 8]]}},
    "covered by rows that overlap": {
        "t": {
            "dtype": "uint8",
            "size": [4, 4],
            "chunks": [[[0, 0], [2, 4], "f", 0], [[1, 0], [2, 4], "f", 8]],
        }
    },
    "bytes of another tensor": {"t": TENSOR, "u": TENSOR},
    "one byte of another tensor": {
        "t": {"dtype": "uint8", "size": [9], "chunks": [[[0], [9], "f", 0]]},
        "u": {"dtype": "uint8", "size": [8], "chunks": [[[0], [8], "f", 8]]},
    },
    "a part without elements": {
        "t": {**TENSOR, "chunks": [[[0], [4], "f", 0], [[0], [0], "f", 0]]}
    },
    "impossible strides": {"t": {**TENSOR, "size": [0, 2**40, 2**40], "chunks": []}},
    "too many dimensions": {"t": {**TENSOR, "size": [1] * 65}},
    "a size that is a text": {"t": {**TENSOR, "size": "4"}},
    "a size of truths": {"t": {**TENSOR, "size": [True]}},
}


@pytest.mark.parametrize("what", sorted(TABLES))
def test_an_index_whose_parts_do_not_cover_its_tensors_is_refused(what: str) -> None:
    tensors = TABLES[what]

    with raises_message(CheckpointDamaged):
        decode_table(to_bytes({"tensors": tensors, "items": {}}), {"f": 16})


def test_items_and_tensors_do_not_share_names_or_bytes() -> None:
    for items in ({"t": ["f", 16, 4]}, {"i": ["f", 8, 12]}, {"i": ["f", 16, 4], "j": ["f", 19, 1]}):
        with raises_message(CheckpointDamaged):
            decode_table(to_bytes({"tensors": {"t": TENSOR}, "items": items}), {"f": 20})


@pytest.mark.parametrize("shape", [[6, 4], [4, 6], [3, 4, 2]])
def test_tensors_in_blocks_of_any_layout_are_read(shape: list[int]) -> None:
    blocks, start = [], 0
    for row in range(2):
        for column in range(2):
            offset, sizes = [0] * len(shape), list(shape)
            for dim, place in ((0, row), (1, column)):
                cut = shape[dim] // 2
                offset[dim], sizes[dim] = (0, cut) if place == 0 else (cut, shape[dim] - cut)
            count = 1
            for size in sizes:
                count *= size
            blocks.append([offset, sizes, "f", start])
            start += count
    random.Random(0).shuffle(blocks)
    table = {"tensors": {"t": {"dtype": "uint8", "size": shape, "chunks": blocks}}, "items": {}}

    assert len(decode_table(to_bytes(table), {"f": 24}).state_dict_metadata) == 1


def test_a_small_file_does_not_become_a_large_state(
    runs: Runs, kept: tuple[MemoryStorage, str]
) -> None:
    storage, name = kept
    table = json.loads(storage.files[f"{name}/metadata.json"])
    size = len(storage.files[f"{name}/tensors-00000.bin"])
    for number in range(4096):
        chunk = [[0], [size], "tensors-00000.bin", 0]
        table["tensors"][f"optimizer/more/{number}"] = {
            "dtype": "uint8", "size": [size], "chunks": [chunk]
        }  # fmt: skip
    _forge(storage, name, "metadata.json", to_bytes(table))
    run = runs(storage)

    tracemalloc.start()
    try:
        _refused(run, "uses bytes of tensors-00000.bin twice")
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["quint8", "quint4x2", "bits8", "float33"])
def test_a_dtype_that_cannot_be_read_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str], dtype: str
) -> None:
    storage, name = kept
    table = json.loads(storage.files[f"{name}/metadata.json"])
    reported = table["tensors"]["model/bias"]
    reported["dtype"] = dtype
    _forge(storage, name, "metadata.json", to_bytes(table))

    _refused(runs(storage))


GENERATORS: dict[str, Change] = {
    "no dictionary": lambda _: 3,
    "zeros by the million": lambda state: {**state, "torch": 10**12},
    "no torch": lambda state: {**state, "torch": {"$": "bytes", "v": ""}},
    "a position outside": lambda s: {**s, "numpy": _numpy(s, 2, 10**9)},
    "a negative position": lambda s: {**s, "numpy": _numpy(s, 2, -1)},
    "another generator": lambda s: {**s, "numpy": _numpy(s, 0, "PCG64")},
    "too few keys": lambda s: {**s, "numpy": _numpy(s, 1, [1, 2])},
    "no state of Python's": lambda state: {**state, "python": None},
}


def _numpy(state: Any, at: int, value: Any) -> Any:
    values = [*state["numpy"]["v"]]
    values[at] = value
    return {"$": "tuple", "v": values}


def _item_forged(storage: MemoryStorage, name: str, key: str, change: Change) -> None:
    table = json.loads(storage.files[f"{name}/metadata.json"])
    old, new, start_bytes = storage.files[f"{name}/items-00000.jsonl"], b"", 0
    for one, (file, start, size) in table["items"].items():
        data = old[start : start + size]
        if one == key:
            data = to_bytes(change(from_bytes(data, key)))
        table["items"][one] = [file, start_bytes, len(data)]
        new, start_bytes = new + data, start_bytes + len(data)
    _forge(storage, name, "items-00000.jsonl", new)
    _forge(storage, name, "metadata.json", to_bytes(table))


@pytest.mark.parametrize("what", sorted(GENERATORS))
def test_an_invalid_random_state_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str], what: str
) -> None:
    _item_forged(*kept, "random/0", GENERATORS[what])

    _refused(runs(kept[0]), "the state of a random generator is invalid")


def _model(state: Any, name: str, value: Any) -> Any:
    """Return a model's state, which is an ordered dictionary, with another value or without."""
    pairs = [[key, value if key == name else own] for key, own in state["v"]]
    return {"$": "ordered", "v": [pair for pair in pairs if pair[1] is not None]}


def _swapped(state: Any, one: str, other: str) -> Any:
    values = dict(state["v"])
    values[one], values[other] = values[other], values[one]
    return {"$": "ordered", "v": [[key, value] for key, value in values.items()]}


STATES: dict[str, tuple[str, Change]] = {
    "a list for the model": ("model", lambda _: []),
    "a number for a weight": ("model", lambda state: _model(state, "bias", 1.0)),
    "another tensor for a weight": ("model", lambda s: _model(s, "bias", dict(s["v"])["weight"])),
    "weights that are swapped": ("model", lambda s: _swapped(s, "weight", "bias")),
    "no weight": ("model", lambda state: _model(state, "weight", None)),
    "a list for the optimizer": ("optimizer", lambda _: []),
    "no groups": ("optimizer", lambda state: {"state": state["state"]}),
    "invalid groups": ("optimizer", lambda s: {**s, "param_groups": [3]}),
    "invalid parameters": ("optimizer", lambda s: {**s, "param_groups": [{"params": 3}]}),
    "a state that is a number": ("optimizer", lambda s: {**s, "state": {"bias": 3}}),
    "no state of one parameter": (
        "optimizer",
        lambda s: {**s, "state": {"bias": s["state"]["bias"]}},
    ),
    "a text for a rate": (
        "optimizer", lambda s: {**s, "param_groups": [{**s["param_groups"][0], "lr": "x"}]}
    ),
    "texts for a pair of numbers": (
        "optimizer",
        lambda s: {**s, "param_groups": [{**s["param_groups"][0], "betas": ["x", []]}]},
    ),
    "no average": (
        "optimizer", lambda s: {**s, "state": {**s["state"], "bias": {}}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(STATES))
def test_a_state_of_another_structure_is_refused(
    runs: Runs, kept: tuple[MemoryStorage, str], what: str
) -> None:
    key, change = STATES[what]
    _item_forged(*kept, key, change)

    _refused(runs(kept[0]), "was not written by evenstride")


@pytest.mark.parametrize("seed", range(40))
def test_random_changes_of_a_manifest_are_refused_or_harmless(
    kept: tuple[MemoryStorage, str], seed: int
) -> None:
    choose = random.Random(seed)
    plain = _manifest(*kept)
    for _ in range(25):
        with contextlib.suppress(CheckpointDamaged, ConfigError):  # the latter: another version
            decode(sealed(mutated(plain, choose)))


def test_the_schema_has_every_field_of_a_position(kept: tuple[MemoryStorage, str]) -> None:
    fields = PositionSchema.model_fields.keys() - {"batches"}

    assert fields == _manifest(*kept)["stride"].keys()
