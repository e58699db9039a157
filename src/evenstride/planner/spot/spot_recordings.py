"""Recordings of spot machines that a user made: how soon they are lost, and how long one waits.

A file is CSV with one of two headers, or JSON as github.com/skypilot-org/spot-traces has it:

    at_s,up              how many machines were up, at looks that are equally far apart
    came_s,gone_s        one machine each: from when to when it was there; gone_s is empty if it
                         was there to the end

Seconds are counted from the start of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.errors import ConfigError
from evenstride.planner.search.candidates import Kind
from evenstride.planner.spot.preemption_rate import PreemptionRate, from_recorded
from evenstride.planner.spot.restart_cost import waits_s
from evenstride.sim.scenario.spot_traces import MOST_UP, Machines, SpotTrace, machines

_UP, _LIVES = ("at_s", "up"), ("came_s", "gone_s")
_TOLD = 5
_UNEVEN = 0.01  # of the time between two looks, by which it may differ
_GAP_S, _MOST_TICKS = 60.0, 50_000

EXAMPLE = "at_s,up\n0,4\n600,4\n1200,3"


def read_recording(path: Path) -> Machines:
    """Return the machines of a file.

    Raises:
        ConfigError: it cannot be read, or says what cannot be; with the numbers of the lines.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigError(
            f"{path} cannot be read: {why}; give a recording such as\n{EXAMPLE}"
        ) from None
    if text.lstrip().startswith("{"):
        return machines([_of_json(path, text)])
    rows = list(_rows(text))
    names = tuple(name.strip().lower() for name in rows[0][1]) if rows else ()
    if names not in (_UP, _LIVES):
        raise ConfigError(
            f"{path} begins with {','.join(names) or 'nothing'}; a recording has the columns at_s "
            f"and up, or came_s and gone_s, and looks like\n{EXAMPLE}"
        )
    if names == _UP:
        found = _read(path, rows[1:], _look)
        return machines(
            [SpotTrace(str(path), _gap_s(path, rows[1:], found), found[:, 1].astype(np.int64))]
        )
    return _of_lives(_read(path, rows[1:], _life))


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line.split(",")


def _read(
    path: Path,
    rows: Sequence[tuple[int, list[str]]],
    one: Callable[[list[str]], tuple[float, float]],
) -> FloatArray:
    """Return what rows say, as an array; refuses all if one is wrong."""
    found, wrong = list[tuple[float, float]](), list[str]()
    for line, cells in rows:
        try:
            found.append(one(cells))
        except ValueError as error:
            wrong.append(f"line {line}: {error}")
    if wrong:
        more = f"; and {len(wrong) - _TOLD} more lines" if len(wrong) > _TOLD else ""
        raise ConfigError(f"{path}: {'; '.join(wrong[:_TOLD])}{more}")
    if len(found) < 2:
        raise ConfigError(
            f"{path} has {len(found)} rows under its header; at least two are needed, and many "
            "more to tell a rate of losses"
        )
    return np.array(found)


def _look(cells: list[str]) -> tuple[float, float]:
    at_s, up = _numbers(cells, ("a time in seconds", "a number of machines"))
    if up != int(up):
        raise ValueError(f"{cells[1].strip()} machines; a whole number of them is up")
    if up > MOST_UP:
        raise ValueError(
            f"{cells[1].strip()} machines; {MOST_UP:,} is the most that are up at once"
        )
    return at_s, up


def _life(cells: list[str]) -> tuple[float, float]:
    open_end = len(cells) == 2 and not cells[1].strip()
    both = [cells[0], "1e300"] if open_end else cells
    came_s, gone_s = _numbers(both, ("a time in seconds", "a time in seconds, or nothing"))
    if gone_s <= came_s:
        raise ValueError(f"it is gone at {gone_s:g} s, and came at {came_s:g} s only; swap them?")
    return came_s, inf if open_end else gone_s


def _numbers(cells: list[str], names: tuple[str, str]) -> list[float]:
    if len(cells) != 2:
        raise ValueError(f"it has {len(cells)} cells; a row has two")
    found = []
    for cell, name in zip(cells, names, strict=True):
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not (isfinite(value) and value >= 0.0):
            raise ValueError(f"{cell.strip()!r} is not {name}, which is a number of at least 0")
        found.append(value)
    return found


def _gap_s(path: Path, rows: Sequence[tuple[int, list[str]]], found: FloatArray) -> float:
    gaps = np.diff(found[:, 0])
    gap_s = float(np.median(gaps))
    off = np.flatnonzero(np.abs(gaps - gap_s) > _UNEVEN * gap_s) if gap_s > 0 else np.zeros(1, int)
    if len(off):
        line = rows[int(off[0]) + 1][0]
        raise ConfigError(
            f"{path}, line {line}: {gaps[off[0]]:g} s after the look before it, and most are "
            f"{gap_s:g} s apart; times rise, and looks are equally far apart"
        )
    return gap_s


def _of_json(path: Path, text: str) -> SpotTrace:
    try:
        told: Any = json.loads(text)
        gap_s, up = float(told["metadata"]["gap_seconds"]), np.array(told["data"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        at = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"{path}: {at}it is JSON, and not as spot-traces has it: "
            '{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0]}'
        ) from None
    sound = up.ndim == 1 and up.dtype.kind == "i" and len(up) > 1 and up.min() >= 0
    if not sound or not 0.0 < gap_s < inf:
        raise ConfigError(
            f"{path}: data are numbers of machines, two or more, and gap_seconds is above 0"
        )
    return SpotTrace(str(path), gap_s, up.astype(np.int64))


def _of_lives(found: FloatArray) -> Machines:
    """Return machines whose lives were recorded one by one, each in a slot that is free."""
    since = found - found[:, 0].min()  # whatever the clock was, such as seconds since 1970
    came_s, gone_s = since[np.argsort(since[:, 0], kind="stable")].T
    end_s = float(np.where(np.isfinite(gone_s), gone_s, came_s).max()) + _GAP_S
    gap_s = max(_GAP_S, end_s / _MOST_TICKS)
    ticks = int(end_s / gap_s) + 1
    came = (came_s / gap_s).astype(np.int64)
    last = (np.minimum(gone_s, ticks * gap_s) / gap_s).astype(np.int64)
    gone = np.maximum(last, came + 1)
    slots, free_from = list[int](), list[int]()
    for first, end in zip(came.tolist(), gone.tolist(), strict=True):
        free = (slot for slot, until in enumerate(free_from) if until <= first)
        slots.append(next(free, len(free_from)))
        free_from[slots[-1] : slots[-1] + 1] = [end]
    who = np.full((ticks, len(free_from)), -1, dtype=np.int64)
    for number, slot in enumerate(slots):
        who[came[number] : gone[number], slot] = number
    return Machines(gap_s, np.array(slots), came, gone, who)


def recorded_transience(path: Path) -> PreemptionRate:
    """Return what a recording tells of losses, and of waits for as many machines as were usual.

    Raises:
        ConfigError: it cannot be read, or no machine was lost in it.
    """
    recorded = read_recording(path)
    up = (recorded.who >= 0).sum(axis=1)
    if not up.any():
        raise ConfigError(f"{path}: no machine was ever up; record when there are some")
    usual = max(int(np.median(up[up > 0])), 1)
    try:
        found = from_recorded(recorded)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return replace(found, reason=f"{path.name}: {found.reason}", waits_s=waits_s(recorded, usual))


def with_recorded(kinds: Sequence[Kind], known: Mapping[str, PreemptionRate]) -> tuple[Kind, ...]:
    """Return kinds of machines with what was recorded of those that may be taken away.

    Raises:
        ConfigError: a type is not among the spot machines.
    """
    there = sorted({kind.type for kind in kinds if kind.spot})
    for name in known:
        if name and name not in there:
            told = ", ".join(there[:_TOLD]) + (" and more" if len(there) > _TOLD else "")
            raise ConfigError(
                f"losses of {name} were recorded, which is not among the spot machines that can be "
                f"planned with ({told or 'there are none'}); name one of them after the file"
            )
    return tuple(
        replace(kind, transience=known.get(kind.type, known.get("", kind.transience)))
        if kind.spot
        else kind
        for kind in kinds
    )
