"""What can be believed of a trace's records: numbers that are numbers, within what there can be.

A trace may have been changed after it was written. What is shown of it is taken as read from here
on, so whatever cannot be is refused before it gets there.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.control.events import Exchanged, FleetFormed, SetShares
from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import EvenstrideError

MOST_STEPS = 10**15
_MOST_SAMPLES = 10**12
_MOST_BYTES = 1 << 62
_LATEST_S = 4.0e9  # over a hundred years
_DEEPEST = 32
_SHORTEST_S = 1e-9


def number_of(value: Any) -> float | None:
    """Return a finite number; ``None`` for all else.

    >>> number_of(3), number_of("3"), number_of(float("inf")), number_of(10**400)
    (3.0, None, None, None)
    """
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def seconds_of(value: Any) -> float | None:
    """Return a moment of a process's clock; ``None`` for what is none."""
    found = number_of(value)
    return found if found is not None and 0.0 <= found <= _LATEST_S else None


def shallow(value: Any, most: int = _DEEPEST) -> Any:
    """Return JSON types in which nothing is nested so deep that it could not be written again.

    Args:
        value: of JSON types.
        most: levels; what lies below is an ellipsis.

    >>> shallow({"a": [1, [2]]}, 2)
    {'a': [1, '…']}
    """
    if not isinstance(value, dict | list):
        return value
    if most <= 0:
        return "…"
    if isinstance(value, dict):
        return {key: shallow(one, most - 1) for key, one in value.items()}
    return [shallow(one, most - 1) for one in value]


def whole_of(value: Any, most: int, low: int = 0) -> int:
    """Return a whole number that lies within bounds.

    Raises:
        ValueError: it is no such number.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise ValueError(f"not a whole number from {low} to {most}")
    return value


def batch_of(value: Any) -> int:
    """Return a global batch.

    Raises:
        ValueError: it is none.
    """
    return whole_of(value, _MOST_SAMPLES, 1)


def lockstep_of(header: dict[str, Any]) -> bool:
    """Return whether all workers of a process take the same steps."""
    try:
        return sync_from_spec(str(header.get("sync") or "bsp")).lockstep
    except EvenstrideError:  # a mode of another version
        return True


def check_formed(event: FleetFormed) -> None:
    """Refuse a group of workers that cannot have met.

    Raises:
        ValueError: it has no workers, or numbers that cannot be.
    """
    whole_of(event.step, MOST_STEPS)
    whole_of(event.generation, MOST_STEPS)
    batch_of(event.global_batch)
    if not event.workers:
        raise ValueError("a group without workers")


def check_shares(told: SetShares, batch: int) -> None:
    """Refuse a split that cannot have been decided.

    Args:
        told: of the split.
        batch: samples of a step.

    Raises:
        TypeError: it is no list of shares.
        ValueError: one of them is no share of that batch, or they hold from no step on.
    """
    whole_of(told.effective, MOST_STEPS)
    if not isinstance(told.shares, tuple):
        raise TypeError("shares are a list")
    for share in told.shares:
        whole_of(share, batch)


def check_exchanged(event: Exchanged) -> None:
    """Refuse an exchange whose counts are no numbers.

    Raises:
        ValueError: of the steps, or of somebody's memory.
    """
    for one in event.memory:
        _check_held(one)


def _check_held(told: PeakMemory) -> None:
    whole_of(told.worker, MOST_STEPS)
    whole_of(told.samples, _MOST_SAMPLES)
    for size in (told.peak_bytes, told.limit_bytes):
        if size is not None:
            whole_of(size, _MOST_BYTES)


def possible(told: Measurements, batch: int) -> npt.NDArray[np.bool_]:
    """Return which reports there can be, bool ``(n,)``.

    They are sound, of no more than the batch, and of no step that took under a nanosecond.
    """
    owner = np.repeat(np.arange(len(told)), told.steps)
    short = np.bincount(owner, weights=told.busy_s < _SHORTEST_S, minlength=len(told))
    samples = (told.share >= 0) & (told.share <= batch)
    return np.asarray(told.sound & samples & (short == 0), dtype=np.bool_)
