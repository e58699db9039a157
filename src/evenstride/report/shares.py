"""The shares of a run as a few lines over its steps, however many workers it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.sim.run import Track
from evenstride.sim.scenario import Scenario

MOST_LINES = 12


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """The shares of a worker, or of several of one kind, over the steps.

    Args:
        name: of them.
        mean: over those who are there, not a number while nobody is.
        least: of any of them.
        most: of any of them.
    """

    name: str
    mean: FloatArray
    least: FloatArray
    most: FloatArray


def bands(track: Track, scenario: Scenario) -> list[Band]:
    """Return a line for each worker, or for each kind if there are more than a dozen.

    Of more kinds than that, the first dozen.
    """
    counts = [group.count for group in scenario.workers]
    names = [group.name for group in scenario.workers]
    if scenario.size <= MOST_LINES:
        names = [
            name if count == 1 else f"{name}/{number}"
            for name, count in zip(names, counts, strict=True)
            for number in range(count)
        ]
        counts = [1] * scenario.size
    ends = np.cumsum(counts)[:MOST_LINES]
    starts = ends - counts[:MOST_LINES]
    return [
        _band(name, [split[start:end] for split in track.splits], track.shares)
        for name, start, end in zip(names, starts, ends, strict=False)
    ]


def _band(name: str, splits: list[IntArray], at: IntArray) -> Band:
    """Return the band of one kind, given its part of every split and the split of every step."""
    figures = np.full((3, len(splits)), np.nan)
    for number, split in enumerate(splits):
        there = split[split > 0]
        if len(there):
            figures[:, number] = there.mean(), there.min(), there.max()
    return Band(name, *figures[:, at])
