"""Recordings of spot machines that a user made: how soon they are lost, and how long one waits.

A file is CSV with one of two headers, or JSON as github.com/skypilot-org/spot-traces has it:

    at_s,up              how many machines were up, at looks that are equally far apart
    came_s,gone_s        one machine each: from when to when it was there; gone_s is empty if it
                         was there to the end

Seconds are counted from the start of the recording.
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
_TOLD = 5
_UNEVEN = 0.01  # of the time between two looks, by which it may differ
_GAP_S, _MOST_TICKS = 60.0, 50_000
_FEWEST_WINDOWS = 10
_FEWEST_LOSSES = 5

EXAMPLE = "at_s,up\n0,4\n600,4\n1200,3"


def read_recording(path: Path) -> Machines:
    """Return the machines of a file."""
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
    """Return what a recording tells of losses, and of waits for as many machines as were usual."""
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


def from_recorded(
    recorded: Machines, window_s: float = DAY_S, max_life_s: float = inf, drift: float = DRIFT
) -> PreemptionRate:
    """Return how soon machines are taken away, as estimated from a recording.

    Fits the models of lifetimes and keeps the best (`core.reliability.survival_fit.choose`), up to
    the provider's limit ``max_life_s``. Rates come from windows of the recording: losses over
    machine-seconds, each window weighted by its machine-seconds. So the rates reflect that losses
    come together, which a model of single machines does not. A window is at best about as long as
    the run, and at most a tenth of the recording. Rates are multiplied by a factor for how far
    future days may differ from the recorded ones; ``drift`` is the standard deviation of its
    logarithm.

    Where none was lost of those that came while it was recorded, a constant rate stands in, from
    all losses: of machines that were there from the start the age is not known. After fewer than
    five losses, rates are as likely as so few of them make them, since windows would not show them.

    Raises:
        ConfigError: no machine was lost, or one was older than the limit.
    """
    lifetime, told = _lifetime(recorded, max_life_s)
    losses = int((recorded.gone < len(recorded.who)).sum())
    if losses < _FEWEST_LOSSES:
        rates, of = _rates_of_few(losses, _up_s(recorded)), "rates as likely as so few losses are"
    else:
        rates, count = _window_rates(recorded, window_s)
        of = f"rates of {count} windows of the recording"
    to_come = np.outer(rates, drift_factors(drift, len(rates)))
    found = np.quantile(to_come, QUANTILES)
    return PreemptionRate(lifetime, tuple(found.tolist()), f"{told}; {of}")


def _lifetime(recorded: Machines, max_life_s: float) -> tuple[Lifetime, str]:
    ended = recorded.gone < len(recorded.who)
    losses = int(ended.sum())
    if not losses:
        raise ConfigError(
            f"none of its {len(ended)} machines was lost, so it tells nothing of losses; record "
            "for longer, or leave it out, and the catalogue's figures count"
        )
    if (ended & (recorded.came > 0)).any():
        chosen = choose(recorded.lives(), max_life_s)
        return chosen.fit.lifetime, chosen.reason
    mean_s = _up_s(recorded) / losses
    who = "loss" if losses == 1 else "losses"
    return Exponential(mean_s), (
        f"a constant rate with a mean life of {mean_s / 3600.0:.3g} h: {losses} {who}, all of "
        "machines that were there from the start, whose age is not known"
    )


def _up_s(recorded: Machines) -> float:
    """Return for how long machines were up, all together."""
    return float((recorded.who >= 0).sum()) * recorded.gap_s


def _rates_of_few(losses: int, up_s: float) -> FloatArray:
    """Return equally likely rates after a few losses, which windows would not tell.

    Source:
        The posterior of a Poisson rate with Jeffreys' prior, a gamma distribution, by the formula
        of Wilson and Hilferty (PNAS 1931).
    """
    shape, normal = losses + 0.5, NormalDist()
    z = np.array([normal.inv_cdf(part) for part in QUANTILES.tolist()])
    cubed = np.maximum(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * sqrt(shape)), 0.05)
    return np.asarray(shape * cubed**3 / up_s)


def _window_rates(recorded: Machines, window_s: float) -> tuple[FloatArray, int]:
    """Return quantiles of the windows' rates, and how many windows there are."""
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
    """Return how long it took in a recording until enough machines were up again.

    There is a wait for each tick at which a machine was lost and as many had been up: 0 where
    enough were left. What the end of the recording cuts off counts as far as it goes.
    """
    up = (recorded.who >= 0).sum(axis=1)
    ticks = len(up)
    lost = np.unique(recorded.gone[recorded.gone < ticks])
    lost = lost[up[lost - 1] >= machines]
    enough = np.append(np.flatnonzero(up >= machines), ticks)
    back = enough[np.searchsorted(enough, lost)]
    return tuple(((back - lost) * recorded.gap_s).tolist())
