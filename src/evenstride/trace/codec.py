"""Events and instructions as plain JSON, and back, without losing a bit.

Floats are written with Python's shortest round-trip representation, so reading gives the very
same numbers; keys keep the order of the fields, so equal values give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from evenstride.core.control import (
    Event,
    ExchangeAfter,
    Exchanged,
    Expect,
    FleetFormed,
    Instruction,
    KeepShares,
    OpeningSkipped,
    SetShares,
)
from evenstride.core.fleet import Worker
from evenstride.core.observation import Observation
from evenstride.errors import TraceError

_TAGGED = (FleetFormed, Exchanged, OpeningSkipped, SetShares, KeepShares, Expect, ExchangeAfter)
_BY_TAG = {cls.__name__: cls for cls in _TAGGED}
_INNER: dict[tuple[str, str], type] = {
    ("FleetFormed", "workers"): Worker,
    ("Exchanged", "observations"): Observation,
}


def dumps(value: object) -> str:
    """Return the one canonical JSON text of a value, without spaces or line ends.

    Raises:
        ValueError: the value contains NaN or infinity, which JSON does not know.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def encode(value: Event | Instruction) -> dict[str, Any]:
    """Return the value as JSON types, with its kind under ``type``."""
    return {"type": type(value).__name__, **_plain(value)}


def decode(plain: dict[str, Any]) -> Event | Instruction:
    """Return the event or instruction that `encode` wrote.

    Raises:
        TraceError: the type is not known, or its fields do not fit.
    """
    tag = plain.get("type")
    if not isinstance(tag, str) or tag not in _BY_TAG:
        raise TraceError(f"{tag!r} is neither an event nor an instruction of this version")
    try:
        values = {f.name: _value(tag, f.name, plain[f.name]) for f in fields(_BY_TAG[tag])}
        return _BY_TAG[tag](**values)
    except (KeyError, TypeError) as error:
        raise TraceError(f"a {tag} lacks a field or has a wrong one: {error}") from None


def encode_observation(observation: Observation) -> dict[str, Any]:
    """Return one observation as JSON types, as a rank sends it to the leader."""
    return _plain(observation)


def decode_observation(plain: dict[str, Any]) -> Observation:
    """Return the observation that `encode_observation` wrote."""
    return Observation(**{name: _tuples(value) for name, value in plain.items()})


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: _jsonable(getattr(value, f.name)) for f in fields(value)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, Worker | Observation):
        return _plain(value)
    return value


def _value(tag: str, name: str, plain: Any) -> Any:
    inner = _INNER.get((tag, name))
    if inner is None:
        return _tuples(plain)
    return tuple(inner(**{k: _tuples(v) for k, v in item.items()}) for item in plain)


def _tuples(plain: Any) -> Any:
    return tuple(_tuples(item) for item in plain) if isinstance(plain, list) else plain
