"""Who ran slower than at its best for a while, as balancing hides that from the waits.

A worker that slowed down gets fewer samples, and then nobody waits for it. What it cost is in the
shares of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.report.analysis.attribution import Study
from evenstride.report.analysis.speed_phases import SpeedPhase

_SLOW = 0.9  # of its own best speed
_LASTING = 0.05  # of all steps
_MOST_PHASES = 3


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A worker that was slower than at its best, where its waits do not tell that already.

    Args:
        rank: of the worker.
        lost: steps at its best speed that it lost.
        told: how slow it was when, such as ``ran at 0.5 of its best speed since step 200``.
    """

    rank: int
    lost: float
    told: str


def slowed_of(study: Study, ranks: Iterable[int]) -> tuple[Slowdown, ...]:
    """Return who of some workers slowed down, who lost most first.

    Cost:
        that of their phases, some 20 ms for each worker.
    """
    found = []
    for rank in ranks:
        phases = [
            one
            for one in study.phases(rank)
            if one.speed < _SLOW and _steps(one) >= _LASTING * study.generation.steps
        ]
        told = _told(study, rank, phases)
        if told:
            lost = sum((1.0 - one.speed) * _steps(one) for one in phases)
            found.append(Slowdown(rank, lost, f"ran {told}"))
    return tuple(sorted(found, key=lambda one: -one.lost))


def _steps(phase: SpeedPhase) -> int:
    return phase.last - phase.first + 1


def _told(study: Study, rank: int, phases: Sequence[SpeedPhase]) -> str:
    """Return at which speed a worker ran when; nothing where its waits tell that already."""
    if not phases:
        return ""
    blamed = any(one.rank == rank and one.stretches for one in study.blames)
    if len(phases) > _MOST_PHASES:
        if blamed:
            return ""
        slowest = min(one.speed for one in phases)
        return (
            f"below its best speed in {len(phases)} phases, at {slowest:.2f} of it in the slowest"
        )
    changes = [_share_change(study, rank, one) for one in phases]
    if blamed and not any(changes):
        return ""
    return "; ".join(
        f"at {one.speed:.2f} of its best speed {_when(study, one)}{change}"
        for one, change in zip(phases, changes, strict=True)
    )


def _when(study: Study, phase: SpeedPhase) -> str:
    first = study.generation.first
    if phase.last >= study.generation.steps - 1:
        return f"since step {first + phase.first:,}"
    return f"in steps {first + phase.first:,} to {first + phase.last:,}"


def _share_change(study: Study, rank: int, phase: SpeedPhase) -> str:
    """Return how its share answered to a phase of its speed."""
    share = study.share(rank)
    before, after = share[max(phase.first - 1, 0)], share[phase.last]
    if np.isnan(before) or np.isnan(after) or before == after:
        return ""
    return f", its share going from {before:,.0f} to {after:,.0f} samples"
