"""After how many epochs a training first came to its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

MEMORY = 10.0
"""Measured steps over which a training loss is averaged; see `smoothed`."""


class Value(NamedTuple):
    """A figure that is to fall, and where in the training it was found."""

    epochs: float  # trained until then
    value: float  # of the figure; infinite where it was no number


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """How a training stands to its target."""

    epochs: float | None  # until the target was reached; ``None`` if it was not
    nearest: Value  # the least value, where it was found first
    # Whether the first value of all was there already, so that it may have been sooner.
    at_first: bool = False


def reaching(values: Sequence[Value], target: float) -> TimeToTarget:
    """Return when some values first came to a target from above.

    Between the last value above it and the first one at or below it, the figure is taken to fall in
    a straight line.

    >>> reaching([Value(1.0, 0.9), Value(2.0, 0.5), Value(3.0, 0.3)], 0.4).epochs
    2.5
    """
    nearest = min(values, key=lambda one: (one.value, one.epochs))
    for place, one in enumerate(values):
        # Not ``>``, because a value that is no number has not come to the target either.
        if not one.value <= target:
            continue
        # Before the first value nothing is known, so it may have been there sooner.
        before = values[place - 1] if place else one
        # There is no straight line down from infinity.
        if not isfinite(before.value) or before.value <= target:
            return TimeToTarget(one.epochs, nearest, at_first=not place)
        part = (before.value - target) / (before.value - one.value)
        return TimeToTarget(before.epochs + part * (one.epochs - before.epochs), nearest)
    return TimeToTarget(None, nearest)


def smoothed(values: Sequence[Value], memory: float = MEMORY) -> list[Value]:
    """Return the exponential means of values and of where they were found.

    The loss of one batch scatters, so the first one below a target may be luck. A mean over
    ``memory`` values scatters ``sqrt(2 * memory - 1)`` times less: 4.4 times with 10, which is
    still short beside a training of some hundred measured steps. A mean of losses alone would be
    late, by more epochs the larger the batch; so the epochs are averaged with the same weights, and
    the two belong together wherever the loss is nearly straight over so many steps. Values that are
    no numbers are left out.

    Args:
        values: in the order of their epochs.
        memory: values after which one counts ``1 / e`` of what it did, or nearly so; at least 1.

    Cost:
        O(values).
    """
    keep, weight, epochs, value = 1.0 - 1.0 / memory, 0.0, 0.0, 0.0
    found = []
    for one in values:
        if one.value == inf:
            continue
        weight = keep * weight + 1.0
        epochs, value = keep * epochs + one.epochs, keep * value + one.value
        # Over the sum of the weights, or the first means would be drawn towards 0.
        found.append(Value(epochs / weight, value / weight))
    return found
