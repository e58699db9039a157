"""What is remembered of workers beyond their generation: how long their steps take.

The *shape* of a worker's time curve belongs to model and device, so it is kept when the worker is
told to leave, when its process starts anew with another rank, and in a checkpoint. A newcomer is
recognised by where it runs: best the very place (host, device and slot), else another device of
the kind on the same host, else the same kind of device elsewhere. The less alike, the more doubt
about its speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray

# By how much a speed may have changed meanwhile, as a standard deviation: of the very same worker,
# of a like device on the same host, and of one elsewhere.
_DOUBT = (0.05, 0.15, 0.3)
# Workers that are remembered at most; those of the latest fleets stay.
MOST_PROFILES = 20_000


class WorkerPlace(Protocol):
    """Where a worker runs; a `Worker` of a fleet, or its profile."""

    @property
    def host(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What is known of one worker's step times."""

    host: str  # where it runs
    device: str  # what computes its steps, as a fingerprint; empty if not known
    slot: int | None  # which of the host's workers it is; ``None`` if not known
    name: str  # of the worker
    curve: tuple[float, float, float, float, float]  # the five numbers of its `CurveEstimates`
    noise: float  # relative variance of one step's time
    steps: int  # learned from

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> WorkerProfile:
        """Return the profile that `to_plain` wrote; `ValueError` if it is none."""
        try:
            curve = tuple(float(number) for number in plain["curve"])
            profile = cls(**{**plain, "curve": curve})
            sound = len(curve) == 5 and all(map(isfinite, (*curve, profile.noise)))
            if not (sound and profile.steps > 0 and curve[1] > 0 and profile.noise > 0):
                raise ValueError("its numbers are no time curve")
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no profile of a worker: {error}") from None
        return profile


def profiles_of(
    workers: Sequence[WorkerPlace], curves: FloatArray, noise: FloatArray, steps: IntArray
) -> tuple[WorkerProfile, ...]:
    """Return the profiles of those that have been measured; ``curves`` are rows, ``(5, W)``."""
    return tuple(
        WorkerProfile(
            workers[rank].host,
            workers[rank].device,
            workers[rank].slot,
            workers[rank].name,
            tuple(curves[:, rank].tolist()),
            float(noise[rank]),
            int(steps[rank]),
        )
        for rank in np.flatnonzero(steps > 0).tolist()
    )


def merged(
    older: Iterable[WorkerProfile], newer: Iterable[WorkerProfile]
) -> tuple[WorkerProfile, ...]:
    """Return both, a newer one in place of the older one of the same worker."""
    by_place = {_place(profile): profile for profile in older}
    for profile in newer:
        by_place.pop(_place(profile), None)  # so that the latest come last
        by_place[_place(profile)] = profile
    return tuple(by_place.values())[-MOST_PROFILES:]


@dataclass(frozen=True, slots=True, eq=False)
class Recollection:
    """What is remembered of ``n`` workers that a run has not measured."""

    ranks: IntArray  # whose it is, ``(n,)``
    curves: FloatArray  # rows of `CurveEstimates`, ``(5, n)``
    doubt: FloatArray  # standard deviation of each one's speed since then, as a part, ``(n,)``
    noise: FloatArray  # relative variance of one step's time, ``(n,)``
    steps: IntArray  # learned from, ``(n,)``


def recalled(
    steps: IntArray, workers: Sequence[WorkerPlace], known: Sequence[WorkerProfile]
) -> Recollection:
    """Return what is remembered of workers that this run has not measured.

    Each profile stands for one worker at most as long as there is another that is as alike; of
    equally alike ones, the first in order of rank gets the first. Cost: ``O(W + P)`` for ``P``
    profiles.
    """
    # What this run has measured is newer than any profile.
    missing = [rank for rank in range(len(workers)) if not steps[rank]]
    found = _matched(missing, workers, known) if missing and known else {}
    profiles = [profile for profile, _ in found.values()]
    return Recollection(
        np.array(list(found), dtype=np.int64),
        np.array([profile.curve for profile in profiles]).reshape(-1, 5).T,
        np.array([doubt for _, doubt in found.values()]),
        np.array([profile.noise for profile in profiles]),
        np.array([profile.steps for profile in profiles], dtype=np.int64),
    )


def _keys(one: WorkerPlace) -> tuple[tuple[object, ...], ...]:
    """Return what the same worker, a like one on the same host, and a like one elsewhere share."""
    # Without a fingerprint, a like device cannot be distinguished from another one.
    if not one.device:
        return ((one.name,),)
    return (one.host, one.device, one.slot), (one.host, one.device), (one.device,)


def _place(profile: WorkerProfile) -> tuple[object, ...]:
    return _keys(profile)[0]


def _matched(
    missing: list[int], workers: Sequence[WorkerPlace], known: Sequence[WorkerProfile]
) -> dict[int, tuple[WorkerProfile, float]]:
    """Return for ranks a profile that is like them, and the doubt about it; most alike first."""
    # One that stands for nobody yet comes before others; where all do, that of another worker of
    # the kind is better than none.
    found: dict[int, tuple[WorkerProfile, float]] = {}
    used = set[int]()
    # All workers at one level before the next, so that the very place goes to no mere look-alike.
    for level, doubt in enumerate(_DOUBT):
        alike: dict[tuple[object, ...], list[int]] = {}
        for at in range(len(known) - 1, -1, -1):  # so that the first comes off the end first
            keys = _keys(known[at])
            if level < len(keys) and (at not in used or level > 0):
                alike.setdefault(keys[level], []).append(at)
        for rank in missing:
            keys = _keys(workers[rank])
            there = alike.get(keys[level]) if rank not in found and level < len(keys) else None
            if there:
                at = _next(there, used)
                found[rank] = known[at], doubt
                used.add(at)
    return found


def _next(there: list[int], used: set[int]) -> int:
    """Return the next one that stands for nobody, or the last one of them."""
    while len(there) > 1 and there[-1] in used:
        there.pop()
    return there[-1]
