"""Events and instructions as plain JSON, and back, without losing a bit.

Floats are written with Python's shortest round-trip representation, so reading gives the very
same numbers; keys keep the order of the fields, so equal values give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from math import isfinite, nan
from typing import Any

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.control.events import (
    EpochEnded,
    Event,
    ExchangeAfter,
    Exchanged,
    Expect,
    FleetFormed,
    Instruction,
    KeepShares,
    LetGo,
    MembersChanged,
    NotMeasured,
    OpeningSkipped,
    Recalled,
    SaveAfter,
    SetBatch,
    SetShares,
)
from evenstride.core.fleet import Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import TraceError

_TAGGED = (
    *(FleetFormed, Exchanged, OpeningSkipped, MembersChanged, Recalled, EpochEnded, NotMeasured),
    *(SetShares, KeepShares, SetBatch, Expect, ExchangeAfter, SaveAfter, LetGo),
)
_BY_TAG = {cls.__name__: cls for cls in _TAGGED}
_MAYBE_UNKNOWN = (
    *("busy_s", "wait_s", "data_s", "outside_s", "control_wait_s"),
    *("cpu_load", "memory_load"),
)


def dumps(value: object) -> str:
    """Return the one canonical JSON text of a value, without spaces or line ends.

    Raises:
        ValueError: the value contains NaN or infinity, which JSON does not know.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def encode(value: Event | Instruction) -> dict[str, Any]:
    """Return the value as JSON types, with its kind under ``type``."""
    plain = {"type": type(value).__name__, **_plain(value)}
    if plain.get("last") is False:  # as hardly any is; older traces do not say it either
        del plain["last"]
    if plain.get("epoch", 0) is None:  # older traces do not say it either
        del plain["epoch"]
    return plain


def decode(plain: Any) -> Event | Instruction:
    """Return the event or instruction that `encode` wrote.

    A field that an older version did not write has its default.

    Raises:
        TraceError: the value is not an object, its type is not known, or its fields do not fit.
    """
    tag = plain.get("type") if isinstance(plain, dict) else plain
    if not isinstance(tag, str) or tag not in _BY_TAG:
        shown = str(tag)[:40]
        raise TraceError(f"{shown!r} is neither an event nor an instruction of this version")
    try:
        known = [f for f in fields(_BY_TAG[tag]) if f.name in plain or f.default is MISSING]
        values = {f.name: _value(tag, f.name, plain[f.name]) for f in known}
        return _BY_TAG[tag](**values)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"a {tag} lacks a field or has a wrong one: {error}") from None


def encode_observation(observation: Observation) -> dict[str, Any]:
    """Return one observation as JSON types, as a rank sends it to the leader.

    A time or load that is not a finite number becomes ``null``, and not-a-number when read.
    """
    plain = _plain(observation)
    for name in _MAYBE_UNKNOWN:
        plain[name] = _finite(plain[name])
    return plain


def decode_observation(plain: Any) -> Observation:
    """Return the observation that `encode_observation` wrote.

    Raises:
        TypeError: the value is not an object, or its fields do not fit.
    """
    if not isinstance(plain, dict):
        raise TypeError(f"an observation must be an object, not {str(plain)[:40]}")
    values = {name: _tuples(value) for name, value in plain.items()}
    for name in _MAYBE_UNKNOWN:
        if name in values:
            values[name] = _with_nan(values[name])
    return Observation(**values)


def _finite(time_s: Any) -> Any:
    if isinstance(time_s, list):
        return [_finite(one) for one in time_s]
    return time_s if isfinite(time_s) else None


def _with_nan(time_s: Any) -> Any:
    if isinstance(time_s, tuple):
        return tuple(_with_nan(one) for one in time_s)
    return nan if time_s is None else time_s


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: _jsonable(getattr(value, f.name)) for f in fields(value)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, Measurements):
        return [encode_observation(seen) for seen in value]
    return (
        _plain(value)
        if isinstance(value, (Worker, PeakMemory, Happening, WorkerProfile))
        else value
    )


def _value(tag: str, name: str, plain: Any) -> Any:
    match tag, name:
        case "FleetFormed", "workers":
            return tuple(map(_worker, plain))
        case "Exchanged", "observations":
            return Measurements.of(map(decode_observation, plain))
        case "Exchanged", "memory":
            return tuple(PeakMemory(**item) for item in plain)
        case _, "happenings":
            return tuple(
                Happening(**{**item, "change": MembershipEvent(item["change"])}) for item in plain
            )
        case "Recalled", "profiles":
            return tuple(map(WorkerProfile.from_plain, plain))
        case _, "shares":
            return _whole_numbers(plain)
    return _tuples(plain)


def _whole_numbers(plain: Any) -> tuple[int, ...]:
    if not isinstance(plain, list) or not all(isinstance(one, int) for one in plain):
        raise TypeError(f"shares must be a list of whole numbers, not {str(plain)[:40]}")
    return tuple(plain)


def _worker(plain: Any) -> Worker:
    worker = Worker(**plain)
    if not isinstance(worker.name, str):
        raise TypeError(f"a worker's name must be text, not {str(worker.name)[:40]}")
    return worker


def _tuples(plain: Any) -> Any:
    return tuple(_tuples(item) for item in plain) if isinstance(plain, list) else plain
