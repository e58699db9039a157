"""The shares of a run as a few lines over its steps, however many workers it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.sim.engine.lockstep import SimulatedSteps
from evenstride.sim.scenario.scenario_model import Scenario

MOST_LINES = 12


@dataclass(frozen=True, slots=True, eq=False)
class ShareBand:
    """The shares of a worker, or of several of one kind, over the steps."""

    name: str
    mean: FloatArray  # over those who are there, not a number while nobody is
    least: FloatArray
    most: FloatArray


def bands(track: SimulatedSteps, scenario: Scenario) -> list[ShareBand]:
    """Return a line for each worker, or for each kind if there are more than a dozen.

    Of more kinds than that, the first dozen.
    """
    alone = scenario.size <= MOST_LINES
    counts = [1] * scenario.size if alone else [group.count for group in scenario.workers]
    names = _names([group.name for group in scenario.workers for _ in range(group.count)], counts)
    ends = np.cumsum(counts)[:MOST_LINES]
    starts = ends - counts[:MOST_LINES]
    return [
        _band(name, [split[start:end] for split in track.splits], track.shares)
        for name, start, end in zip(names, starts, ends, strict=False)
    ]


def _names(names: list[str], counts: list[int]) -> list[str]:
    """Return the names of some lines, given that of every worker and how many are in each line.

    Workers of one name are numbered as in their cluster, where several lines share the name.
    """
    told, known, first = [], dict[str, int](), 0
    lines = Counter(names[begin] for begin in accumulate(counts[:-1], initial=0))
    for count in counts:
        name = names[first]
        begin = known.get(name, 0)
        first, known[name] = first + count, begin + count
        numbers = f"{begin}" if count == 1 else f"{begin}-{begin + count - 1}"
        told.append(name if lines[name] == 1 else f"{name}/{numbers}")
    return told


def _band(name: str, splits: list[IntArray], at: IntArray) -> ShareBand:
    """Return the band of one kind, given its part of every split and the split of every step."""
    figures = np.full((3, len(splits)), np.nan)
    for number, split in enumerate(splits):
        there = split[split > 0]
        if len(there):
            figures[:, number] = there.mean(), there.min(), there.max()
    return ShareBand(name, *figures[:, at])
