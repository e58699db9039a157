"""Saved states come back unchanged or are refused by name; loading runs no code."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import CheckpointDamaged, ConfigError
from evenstride.runtime.checkpoint.format.state_codec import from_bytes, pack, to_bytes, unpack
from tests.messages import raises_message

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=9)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])])
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "v", "a"]), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    x: int


class Colour(IntEnum):
    RED = 1


def _through(state: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    plain = from_bytes(to_bytes(pack(state, "s", tensors)), "s")
    return unpack(plain, tensors)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@given(state=states)
def test_plain_values_come_back_with_their_types(state: Any) -> None:
    assert _same(_through(state), state)


def test_values_that_json_lacks_come_back() -> None:
    state = {"sets": ({1, 2}, frozenset({"a"})), "count": Counter("aab"), "inf": float("-inf")}

    back = _through(state)

    assert _same(back, state)
    assert np.isnan(_through(float("nan")))


def test_tensors_are_kept_apart_by_their_paths() -> None:
    state: dict[str, Any] = {
        "a": [torch.ones(2), {"b": torch.zeros(())}],
        "a/0": torch.full((1,), 3.0),
    }
    tensors: dict[str, torch.Tensor] = {}

    plain = pack(state, "s", tensors)

    assert sorted(tensors) == ["s/a/0", "s/a/0#2", "s/a/1/b"]
    back = unpack(plain, tensors)
    assert torch.equal(back["a"][0], state["a"][0])
    assert torch.equal(back["a/0"], state["a/0"])


def test_arrays_come_back_as_arrays_and_their_scalars_as_numbers() -> None:
    state = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float64(0.5)}

    back = _through(state)

    assert isinstance(back["a"], np.ndarray)
    assert (back["a"] == state["a"]).all()
    assert back["b"] == 0.5


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "builtins.function"),
        (defaultdict(int), "collections.defaultdict"),
        (Pair(1), "Pair"),
        (Colour.RED, "Colour"),
        (os.system, "builtin_function_or_method"),
        (Path(), "PosixPath"),
        (np.array(["x"]), "numpy.ndarray"),
    ],
    ids=lambda of: of if isinstance(of, str) else "value",
)
def test_an_unsafe_value_is_refused_with_its_path_and_type(value: Any, kind: str) -> None:
    with raises_message(ConfigError, kind):
        pack({"deep": [0, value]}, "s", {})


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_a_tensor_without_plain_values_is_refused(tensor: torch.Tensor) -> None:
    with raises_message(ConfigError):
        pack({"t": tensor}, "s", {})


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _pickles(mark: Path) -> dict[str, bytes]:
    command = f"touch {mark}"
    chain = pickle.dumps(Evil((getattr, (Evil((getattr, (Path, "touch"))), "__call__"))))
    return {
        "system": pickle.dumps(Evil((os.system, (command,)))),
        "old protocol": pickle.dumps(Evil((os.system, (command,))), protocol=0),
        "inside a table": pickle.dumps({"tensors": {}, "items": {"a": Evil((eval, ("1",)))}}),
        "getattr": chain,
        "global": f"cposix\nsystem\n(S'{command}'\ntR.".encode(),
        "memo bomb": b"\x80\x04]r\xff\xff\xff\x7f.",
        "behind json": b'{"tensors":{},"items":{}}\n' + pickle.dumps(Evil((os.system, (command,)))),
        "deep": b"[" * 100_000,
        "long": b"9" * 100_000,
    }


@pytest.mark.parametrize("disguise", sorted(_pickles(Path("mark"))))
def test_a_pickle_in_place_of_json_is_refused_and_runs_nothing(
    disguise: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"

    with raises_message(CheckpointDamaged, "JSON"):
        from_bytes(_pickles(mark)[disguise], "the table")

    assert not mark.exists()


@pytest.mark.parametrize(
    "plain",
    [
        {"$": "reduce", "v": ["os.system", "true"]},
        {"$": "os.system", "v": "true"},
        {"$": "__class__", "v": []},
        {"$": ["tuple"], "v": []},
        {"$": "dtype", "v": "__loader__"},
        {"$": "dtype", "v": ["float32"]},
        {"$": "device", "v": "nowhere"},
        {"$": "tensor", "v": "not there"},
        {"$": "dict", "v": [[{}, 1]]},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "bytes", "v": 10**9},
        {"$": "size", "v": ["a"]},
        {"$": "complex", "v": [1, 2, 3]},
        {"$": "tuple"},
    ],
    ids=str,
)
def test_unknown_kinds_are_refused(plain: Any) -> None:
    with raises_message(CheckpointDamaged):
        unpack([plain], {})
