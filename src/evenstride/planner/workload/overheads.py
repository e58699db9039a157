"""What training takes beside its steps: between them, and where a pass over the data begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from evenstride.core.time_model.observation import Observation
from evenstride.planner.workload.leader_processes import ProcessRecord


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the steps' own times and waits leave out, on average."""

    # Of each step: what takes longer than usual between steps, and waits for decisions
    step_s: float
    # Of each pass beside its usual steps: evaluation, saving, and the start of loading; ``None`` if
    # no pass was recorded from its beginning to that of the next one
    epoch_s: float | None


def beside(lives: Iterable[ProcessRecord]) -> Overheads:
    """Return what a run took beside its steps.

    Of each life with several whole passes the first one is left out, in which everything is slow.
    Then steps, and what is beside them, come to the time that the passes took by the clock.
    """
    each = list(lives)
    known = [one for life in each for one in _passes(life)]
    if not known:
        return Overheads(_between_s([one for life in each for one in _leaders(life)]), None)
    passes, sums = len(known), np.array(known).sum(axis=0)
    steps, inner_s, outer_s = sums.tolist()
    return Overheads(max(inner_s, 0.0) / max(steps, 1.0), max(outer_s, 0.0) / passes)


def _between_s(seen: Sequence[Observation]) -> float:
    usual = [one for one in seen if one.modelled]
    steps = sum(one.steps for one in usual)
    return sum(one.outside_s + one.control_wait_s for one in usual) / steps if steps else 0.0


def _leaders(life: ProcessRecord) -> list[Observation]:
    return [one for one in life.observations if one.worker == 0]


def _passes(life: ProcessRecord) -> Iterator[tuple[float, float, float]]:
    """Yield steps, seconds between them, and seconds beside all of that, of each whole pass."""
    seen = sorted(_leaders(life), key=lambda one: one.first_step)
    first_steps, whole = [one.first_step for one in seen], list(pairwise(life.passes))
    for (begun_s, first), (ended_s, end) in whole[1:] or whole:
        own = seen[bisect_left(first_steps, first) : bisect_left(first_steps, end)]
        usual = [time_s for one in own if one.modelled for time_s in _times_s(one)]
        if usual and sum(one.steps for one in own) == end - first:
            # A step that begins a pass counts as a usual one; what it is longer is the pass's own.
            left_s = ended_s - begun_s - float(np.mean(usual)) * (end - first)
            inner_s = min(_between_s(own) * (end - first), max(left_s, 0.0))
            yield end - first, inner_s, left_s - inner_s


def _times_s(one: Observation) -> Iterable[float]:
    return (busy_s + wait_s for busy_s, wait_s in zip(one.busy_s, one.wait_s, strict=True))
