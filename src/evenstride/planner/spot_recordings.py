"""A user's recordings of spot machines: preemption rates, and waiting times for new machines.

A file is CSV with one of two headers, or JSON in the format of github.com/skypilot-org/spot-traces:

    at_s,up              number of machines that were up, at equally spaced times
    came_s,gone_s        one machine each: start and end; gone_s is empty if it was up
                         until the end

Seconds count from the start of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.core.reliability.lifetimes import DAY_S, Exponential, Lifetime
from evenstride.core.reliability.survival_fit import choose
from evenstride.errors import ConfigError
from evenstride.planner.spot_losses import DRIFT, QUANTILES, PreemptionRate, drift_factors
from evenstride.sim.scenario.recordings import MOST_UP, Machines, SpotTrace, machines

_UP, _LIVES = ("at_s", "up"), ("came_s", "gone_s")
_SHOWN = 5
_UNEVEN = 0.01  # tolerance of the time between two rows, as a fraction
_GAP_S, _MOST_TICKS = 60.0, 50_000
_FEWEST_WINDOWS = 10
_FEWEST_LOSSES = 5

EXAMPLE = "at_s,up\n0,4\n600,4\n1200,3"


def read_recording(path: Path) -> Machines:
    """Return the machines of a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read {path}: {why}; give a recording such as\n{EXAMPLE}"
        ) from None
    if text.lstrip().startswith("{"):
        return machines([_of_json(path, text)])
    rows = list(_rows(text))
    names = tuple(name.strip().lower() for name in rows[0][1]) if rows else ()
    if names not in (_UP, _LIVES):
        raise ConfigError(
            f"{path} begins with {','.join(names) or 'nothing'}, but a recording has the columns "
            f"at_s and up, or came_s and gone_s; example:\n{EXAMPLE}"
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
    found, wrong = list[tuple[float, float]](), list[str]()
    for line, cells in rows:
        try:
            found.append(one(cells))
        except ValueError as error:
            wrong.append(f"line {line}: {error}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more lines" if len(wrong) > _SHOWN else ""
        raise ConfigError(f"{path}: {'; '.join(wrong[:_SHOWN])}{more}")
    if len(found) < 2:
        raise ConfigError(
            f"{path} has {len(found)} rows below its header; expected at least two, and many "
            "more to estimate a preemption rate"
        )
    return np.array(found)


def _look(cells: list[str]) -> tuple[float, float]:
    at_s, up = _numbers(cells, ("a time in seconds", "a number of machines"))
    if up != int(up):
        raise ValueError(f"invalid number of machines {cells[1].strip()}: expected an integer")
    if up > MOST_UP:
        raise ValueError(
            f"invalid number of machines {cells[1].strip()}: expected at most {MOST_UP:,} at once"
        )
    return at_s, up


def _life(cells: list[str]) -> tuple[float, float]:
    open_end = len(cells) == 2 and not cells[1].strip()
    both = [cells[0], "1e300"] if open_end else cells
    came_s, gone_s = _numbers(both, ("a time in seconds", "a time in seconds, or nothing"))
    if gone_s <= came_s:
        raise ValueError(f"its end at {gone_s:g} s precedes its start at {came_s:g} s; swap them")
    return came_s, inf if open_end else gone_s


def _numbers(cells: list[str], names: tuple[str, str]) -> list[float]:
    if len(cells) != 2:
        raise ValueError(f"it has {len(cells)} cells; expected two")
    found = []
    for cell, name in zip(cells, names, strict=True):
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not (isfinite(value) and value >= 0.0):
            raise ValueError(f"{cell.strip()!r} is not {name}: expected a number of at least 0")
        found.append(value)
    return found


def _gap_s(path: Path, rows: Sequence[tuple[int, list[str]]], found: FloatArray) -> float:
    gaps = np.diff(found[:, 0])
    gap_s = float(np.median(gaps))
    off = np.flatnonzero(np.abs(gaps - gap_s) > _UNEVEN * gap_s) if gap_s > 0 else np.zeros(1, int)
    if len(off):
        line = rows[int(off[0]) + 1][0]
        raise ConfigError(
            f"{path}, line {line}: {gaps[off[0]]:g} s after the previous row, but most rows are "
            f"{gap_s:g} s apart; times must rise in equal intervals"
        )
    return gap_s


def _of_json(path: Path, text: str) -> SpotTrace:
    try:
        plain: Any = json.loads(text)
        gap_s, up = float(plain["metadata"]["gap_seconds"]), np.array(plain["data"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        at = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"{path}: {at}it is JSON, but not in the format of spot-traces: "
            '{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0]}'
        ) from None
    sound = up.ndim == 1 and up.dtype.kind == "i" and len(up) > 1 and up.min() >= 0
    if not sound or not 0.0 < gap_s < inf:
        raise ConfigError(
            f"{path}: data must be two or more numbers of machines, and gap_seconds above 0"
        )
    return SpotTrace(str(path), gap_s, up.astype(np.int64))


def _of_lives(found: FloatArray) -> Machines:
    """Return machines whose lives were recorded one by one, each in a free slot."""
    since = found - found[:, 0].min()  # for any clock, such as seconds since 1970
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
    """Return a recording's rate of preemptions, and its waits for the usual number of machines."""
    recorded = read_recording(path)
    up = (recorded.who >= 0).sum(axis=1)
    if not up.any():
        raise ConfigError(f"{path}: no machine was ever up; record while machines are available")
    usual = max(int(np.median(up[up > 0])), 1)
    try:
        found = from_recorded(recorded)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return replace(found, reason=f"{path.name}: {found.reason}", waits_s=waits_s(recorded, usual))


def from_recorded(
    recorded: Machines, window_s: float = DAY_S, max_life_s: float = inf, drift: float = DRIFT
) -> PreemptionRate:
    """Return the rate of preemptions, as estimated from a recording.

    Fits the models of lifetimes and keeps the best (`core.reliability.survival_fit.choose`), up to
    the provider's limit ``max_life_s``. Rates come from windows of the recording: preemptions over
    machine-seconds, each window weighted by its machine-seconds. So the rates reflect that
    preemptions occur together, which a model of single machines does not. A window is at best about
    as long as the run, and at most a tenth of the recording. Rates are multiplied by a factor for
    how far future days may differ from the recorded ones; ``drift`` is the standard deviation of
    its logarithm.

    If no machine that started during the recording was preempted, a constant rate is used instead,
    from all preemptions: the age of machines that were up from the start is not known. With fewer
    than five preemptions, the rates follow from their number, because windows would not show them.

    Raises:
        ConfigError: no machine was preempted, or one was older than the limit.
    """
    lifetime, reason = _lifetime(recorded, max_life_s)
    losses = int((recorded.gone < len(recorded.who)).sum())
    if losses < _FEWEST_LOSSES:
        rates, of = _rates_of_few(losses, _up_s(recorded)), "rates from these few preemptions"
    else:
        rates, count = _window_rates(recorded, window_s)
        of = f"rates from {count} windows of the recording"
    to_come = np.outer(rates, drift_factors(drift, len(rates)))
    found = np.quantile(to_come, QUANTILES)
    return PreemptionRate(lifetime, tuple(found.tolist()), f"{reason}; {of}")


def _lifetime(recorded: Machines, max_life_s: float) -> tuple[Lifetime, str]:
    ended = recorded.gone < len(recorded.who)
    losses = int(ended.sum())
    if not losses:
        raise ConfigError(
            f"none of its {len(ended)} machines was preempted, so the rate is unknown; record "
            "for longer, or omit the recording to use the catalogue's figures"
        )
    if (ended & (recorded.came > 0)).any():
        chosen = choose(recorded.lives(), max_life_s)
        return chosen.fit.lifetime, chosen.reason
    mean_s = _up_s(recorded) / losses
    who = "preemption" if losses == 1 else "preemptions"
    return Exponential(mean_s), (
        f"a constant rate with a mean life of {mean_s / 3600.0:.3g} h, from {losses} {who} of "
        "machines that ran from the start of the recording, so their age is unknown"
    )


def _up_s(recorded: Machines) -> float:
    """Return the total time for which machines were up."""
    return float((recorded.who >= 0).sum()) * recorded.gap_s


def _rates_of_few(losses: int, up_s: float) -> FloatArray:
    """Return equally likely rates after a few preemptions, which windows would not show.

    Source:
        The posterior of a Poisson rate with Jeffreys' prior, a gamma distribution, by the formula
        of Wilson and Hilferty (PNAS 1931).
    """
    shape, normal = losses + 0.5, NormalDist()
    z = np.array([normal.inv_cdf(part) for part in QUANTILES.tolist()])
    cubed = np.maximum(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * sqrt(shape)), 0.05)
    return np.asarray(shape * cubed**3 / up_s)


def _window_rates(recorded: Machines, window_s: float) -> tuple[FloatArray, int]:
    """Return quantiles of the windows' rates, and the number of windows."""
    ticks = len(recorded.who)
    each = max(1, min(round(window_s / recorded.gap_s), ticks // _FEWEST_WINDOWS))
    starts = np.arange(0, ticks, each)
    up = np.add.reduceat((recorded.who >= 0).sum(axis=1), starts) * recorded.gap_s
    losses = np.bincount(recorded.gone[recorded.gone < ticks], minlength=ticks)
    lost = np.add.reduceat(losses, starts)
    there = up > 0.0
    rates, weights = lost[there] / up[there], up[there]
    order = np.argsort(rates, kind="stable")
    upto = np.cumsum(weights[order]) / weights.sum()
    places = np.minimum(np.searchsorted(upto, QUANTILES), len(rates) - 1)
    return np.asarray(rates[order][places]), len(rates)


def waits_s(recorded: Machines, machines: int) -> tuple[float, ...]:
    """Return the times in a recording until enough machines were up again.

    There is a wait for each tick at which a machine was lost while enough were up: 0 if
    enough were left. A wait cut off by the end of the recording counts up to that end.
    """
    up = (recorded.who >= 0).sum(axis=1)
    ticks = len(up)
    lost = np.unique(recorded.gone[recorded.gone < ticks])
    lost = lost[up[lost - 1] >= machines]
    enough = np.append(np.flatnonzero(up >= machines), ticks)
    back = enough[np.searchsorted(enough, lost)]
    return tuple(((back - lost) * recorded.gap_s).tolist())
