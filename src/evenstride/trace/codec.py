"""Encode events and instructions as JSON and back, without loss, and write them to a trace file.

Floats are written with Python's shortest round-trip representation, so reading returns exactly the
same numbers. Keys keep the order of the fields, so equal values give equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, fields
from math import isfinite, nan
from pathlib import Path
from typing import Any, Self, get_args

from evenstride.core.control.events import Event, Instruction
from evenstride.core.fleet import Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.time_model.observation import Measurements, Observation, PeakMemory
from evenstride.errors import TraceError
from evenstride.trace.read import FORMAT

_BY_TAG = {kind.__name__: kind for kind in get_args(Event) + get_args(Instruction)}
_LONGEST_S = 1e9  # longer durations are damage
# Times and loads of an observation that may be unknown.
_MAYBE_UNKNOWN = (
    "busy_s",
    "wait_s",
    "data_s",
    "outside_s",
    "control_wait_s",
    "cpu_load",
    "memory_load",
)


def dumps(value: object) -> str:
    """Return the canonical JSON text of a value, which must contain no NaN or infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def encode(value: Event | Instruction) -> dict[str, Any]:
    """Return the value as JSON types, with its kind under ``type``."""
    plain = {"type": type(value).__name__, **_plain(value)}
    for name in ("last", "epoch_over", "compiled"):
        if plain.get(name) is False:  # the usual case; older traces do not contain it either
            del plain[name]
    for name, usual in (("epoch", None), ("decision_s", 0.0)):
        if plain.get(name, 1) == usual:  # older traces do not contain it either
            del plain[name]
    return plain


def decode(plain: Any) -> Event | Instruction:
    """Return the value that `encode` wrote; a field missing in older versions has its default.

    Raises:
        TraceError: the value is not an event or instruction, or its fields are invalid.
    """
    tag = plain.get("type") if isinstance(plain, dict) else plain
    if not isinstance(tag, str) or tag not in _BY_TAG:
        shown = str(tag)[:40]
        raise TraceError(f"{shown!r} is not an event or instruction of this version")
    try:
        known = [f for f in fields(_BY_TAG[tag]) if f.name in plain or f.default is MISSING]
        values = {f.name: _value(tag, f.name, plain[f.name]) for f in known}
        built: Event | Instruction = _BY_TAG[tag](**values)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"a {tag} record has a missing or invalid field: {error}") from None
    return built


def encode_observation(observation: Observation) -> dict[str, Any]:
    """Return one observation as JSON types; a non-finite time or load becomes ``null``."""
    plain = _plain(observation)
    for name in _MAYBE_UNKNOWN:
        plain[name] = _finite(plain[name])
    return plain


def decode_observation(plain: Any) -> Observation:
    """Return the observation that `encode_observation` wrote; ``null`` becomes NaN again."""
    if not isinstance(plain, dict):
        raise TypeError(f"an observation must be a JSON object, not {str(plain)[:40]}")
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
    if isinstance(value, Worker | PeakMemory | Happening | WorkerProfile):
        return _plain(value)
    return value


def _value(tag: str, name: str, plain: Any) -> Any:
    match tag, name:
        case "FleetFormed", "workers":
            return tuple(map(_worker, plain))
        case "Exchanged", "observations":
            return Measurements.of(map(decode_observation, plain))
        case "Exchanged", "decision_s":
            return _duration(plain)
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


def _duration(plain: Any) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not 0 <= plain < _LONGEST_S:
        raise ValueError(f"a duration must be a number of seconds, not {str(plain)[:40]}")
    return plain


def _whole_numbers(plain: Any) -> tuple[int, ...]:
    if not isinstance(plain, list) or not all(isinstance(one, int) for one in plain):
        raise TypeError(f"shares must be a list of integers, not {str(plain)[:40]}")
    return tuple(plain)


def _worker(plain: Any) -> Worker:
    # Versions without quanta allowed any share.
    worker = Worker(**{"quantum": 1, **plain})
    if not isinstance(worker.name, str):
        raise TypeError(f"a worker's name must be a string, not {str(worker.name)[:40]}")
    return worker


def _tuples(plain: Any) -> Any:
    return tuple(_tuples(item) for item in plain) if isinstance(plain, list) else plain


class TraceWriter:
    """A run's trace, written only by its leader; a crash loses at most one record.

    Every record is one line, passed to the kernel in one ``write``. So it survives the end of the
    process. It is not forced to the disk, because that would be too expensive during training. An
    existing file is continued: an incomplete last line after a crash is closed with a line end, and
    a new header follows.

    Args:
        path: the file; its folder is created.
        header: properties of the run; a replay needs ``policy``, a specification.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _ends_mid_line(path):
            os.write(self._file, b"\n")
        self.record("header", format=FORMAT, **header)

    def record(self, kind: str, **values: Any) -> None:
        """Append one record; ``values`` are JSON types. Does nothing after `close`."""
        if self._file >= 0:
            os.write(self._file, (dumps({"kind": kind, **values}) + "\n").encode())

    def event(
        self,
        at_s: float,
        event: Event,
        verdict: Iterable[Instruction],
        committed_at_s: float | None = None,
    ) -> None:
        """Append an event, decided ``at_s`` seconds into the run, and the instructions.

        ``committed_at_s`` is when the latest of an exchange's steps was committed, if known.
        """
        committed = {} if committed_at_s is None else {"committed_at_s": round(committed_at_s, 6)}
        self.record("event", at_s=round(at_s, 6), **committed, event=encode(event))
        self.record("instructions", instructions=[encode(part) for part in verdict])

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ends_mid_line(path: Path) -> bool:
    size = path.stat().st_size
    if size == 0:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"
