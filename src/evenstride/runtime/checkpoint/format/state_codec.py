"""Encodes states as JSON and tensors, without pickles, so that loading a checkpoint runs no code.

`pack` takes the tensors out of a nested state and turns the rest into JSON types. Other types
become an object whose key ``$`` names the type. `unpack` knows only those types. Types must match
exactly, because a subclass may carry further data.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from evenstride.errors import CheckpointDamaged, ConfigError

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""Every dtype by its name in checkpoints."""

_KIND = "$"
Tensors = dict[str, torch.Tensor]


def pack(state: Any, path: str, tensors: Tensors) -> Any:
    """Return a state as JSON types, and put its tensors into ``tensors`` by their paths.

    The state is nested dictionaries, lists and tuples of plain values and tensors. ``path`` is the
    state's name in errors and the prefix of its tensors' paths.
    """
    if state is None or type(state) in (bool, int, str):
        return state
    if isinstance(state, torch.Tensor):
        return _tensor(state, path, tensors)
    if isinstance(state, np.ndarray):
        return _array(state, path, tensors)
    if isinstance(state, np.generic):
        return pack(state.item(), path, tensors)
    # JSON turns other keys into strings, so such a dictionary is packed as pairs further down.
    if type(state) is dict and all(type(key) is str for key in state) and _KIND not in state:
        return {key: pack(value, f"{path}/{key}", tensors) for key, value in state.items()}
    if type(state) is list:
        return [pack(value, f"{path}/{n}", tensors) for n, value in enumerate(state)]
    if type(state) is float and math.isfinite(state):
        return state
    packer = _PACKERS.get(type(state))
    if packer is None:
        raise _refused(state, path)
    name, to_plain = packer
    return {_KIND: name, "v": to_plain(state, path, tensors)}


def unpack(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `pack` was given.

    Raises:
        CheckpointDamaged: `pack` cannot have returned it.
    """
    try:
        return _unpack(plain, tensors)
    except RecursionError as error:
        raise CheckpointDamaged("a state in a checkpoint is nested too deeply") from error


def _unpack(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_unpack(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _KIND not in plain:
        return {key: _unpack(value, tensors) for key, value in plain.items()}
    kind: Any = plain[_KIND]
    value: Any = plain.get("v")
    try:
        if kind == "tensor":
            return tensors[value]
        if kind == "array":
            return tensors[value].numpy()
        return _UNPACKERS[kind](_unpack(value, tensors))
    except (CheckpointDamaged, RecursionError):
        raise
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointDamaged(
            f"a checkpoint contains an invalid value of type {str(kind)[:40]!r}"
        ) from error


def to_bytes(plain: Any) -> bytes:
    """Return JSON types as the bytes of a file with one line."""
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_bytes(data: bytes, what: str) -> Any:
    """Return the JSON types in the bytes of a file.

    Raises:
        CheckpointDamaged: they are not JSON, but a pickle, for example.
    """
    try:
        # Python's parser also accepts NaN and Infinity, which are never written here.
        return json.loads(data, parse_constant=_refuse_constant)
    except (RecursionError, ValueError) as error:
        raise CheckpointDamaged(f"{what} is not valid JSON") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _tensor(tensor: torch.Tensor, path: str, tensors: Tensors) -> Any:
    _require_plain(tensor, path)
    key, n = path, 1
    # Different keys can give one path, such as 1 and "1".
    while key in tensors:
        n += 1
        key = f"{path}#{n}"
    tensors[key] = tensor.detach()
    return {_KIND: "tensor", "v": key}


def _array(array: np.ndarray[Any, Any], path: str, tensors: Tensors) -> Any:
    try:
        # Reshaped, because ascontiguousarray adds a dimension to an array without any.
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise _refused(array, path) from error
    return {_KIND: "array", "v": _tensor(tensor, path, tensors)["v"]}


def _require_plain(tensor: torch.Tensor, path: str) -> None:
    from torch.distributed.tensor import DTensor

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor):
        raise _refused(tensor, path)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        layout = "a meta" if tensor.is_meta else "a sparse or quantised"
        raise ConfigError(
            f"{path} is {layout} tensor, but checkpoints hold only dense tensors with values; "
            "convert it in state_dict(), or leave it out"
        )


def _refused(value: object, path: str) -> ConfigError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ConfigError(
        f"{path} is a {kind}, which cannot be loaded without running code from the checkpoint. "
        "A state may hold numbers, strings, None, tensors, arrays, and dictionaries, lists and "
        "tuples of them. Leave the object out of state_dict(), and create it in load_state_dict()"
    )


def _pairs(state: Mapping[Any, Any], path: str, tensors: Tensors) -> list[Any]:
    return [
        [pack(key, path, tensors), pack(value, f"{path}/{key}", tensors)]
        for key, value in state.items()
    ]


def _values(state: Iterable[Any], path: str, tensors: Tensors) -> Any:
    return pack(list(state), path, tensors)


_PACKERS: dict[type, tuple[str, Callable[[Any, str, Tensors], Any]]] = {
    # Only infinities and NaN come here; JSON has all others.
    float: ("float", lambda state, *_: str(state)),
    bytes: ("bytes", lambda state, *_: base64.b64encode(state).decode()),
    complex: ("complex", lambda state, *rest: _values((state.real, state.imag), *rest)),
    tuple: ("tuple", _values),
    torch.Size: ("size", _values),
    set: ("set", _values),
    frozenset: ("frozenset", _values),
    dict: ("dict", _pairs),
    OrderedDict: ("ordered", _pairs),
    Counter: ("counter", _pairs),
    torch.dtype: ("dtype", lambda state, *_: str(state).removeprefix("torch.")),
    torch.device: ("device", lambda state, *_: str(state)),
}
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "complex": lambda value: complex(*value),
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda value: Counter(dict(value)),
    "dtype": lambda value: DTYPES[value],
    "device": torch.device,
}
