"""What is stored about workers beyond their generation: their step times.

The *shape* of a worker's time curve depends on model and device. So it is kept when the worker
receives a notice, when its process restarts with another rank, and in a checkpoint. A new worker is
matched by its place: first the same place (host, device and slot), then another device of the same
kind on the same host, then the same kind of device elsewhere. The weaker the match, the larger the
uncertainty of its speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray

# How much a speed may have changed since, as a standard deviation: of the same worker, of a similar
# device on the same host, and of a similar device elsewhere.
_DOUBT = (0.05, 0.15, 0.3)
# Largest number of stored workers; those of the latest fleets stay.
MOST_PROFILES = 20_000


class WorkerPlace(Protocol):
    """The place of a worker; a `Worker` of a fleet, or its profile."""

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
    """The stored step times of one worker."""

    host: str  # where it runs.
    device: str  # fingerprint of the device that computes its steps; empty if not known.
    slot: int | None  # its number among the host's workers; ``None`` if not known.
    name: str  # of the worker.
    curve: tuple[float, float, float, float, float]  # the five numbers of its `CurveEstimates`.
    noise: float  # relative variance of one step's time.
    steps: int  # number of steps it is based on.
    # Samples of a wave, as found in its times: shares in between take as long as whole waves.
    quantum: int = 1
    # Its largest share below a cliff, the smallest slow share, and the seconds there; 0 for none.
    cliff: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> WorkerProfile:
        """Return the profile that `to_plain` wrote; `ValueError` if it is invalid."""
        try:
            curve = tuple(float(number) for number in plain["curve"])
            # Profiles of earlier versions have no cliff and no quantum.
            cliff = tuple(float(number) for number in plain.get("cliff", (0.0, 0.0, 0.0)))
            profile = cls(**{**plain, "curve": curve, "cliff": cliff})
            sound = len(curve) == 5 and len(cliff) == 3
            sound = sound and all(map(isfinite, (*curve, *cliff, profile.noise)))
            sound = sound and profile.quantum >= 1 and min(cliff) >= 0
            if not (sound and profile.steps > 0 and curve[1] > 0 and profile.noise > 0):
                raise ValueError("its numbers do not form a valid time curve")
        except (KeyError, TypeError) as error:
            raise ValueError(f"invalid worker profile: {error}") from None
        return profile


def profiles_of(
    workers: Sequence[WorkerPlace],
    curves: FloatArray,
    noise: FloatArray,
    steps: IntArray,
    quanta: IntArray,
    cliffs: FloatArray,
) -> tuple[WorkerProfile, ...]:
    """Return the profiles of measured workers; ``curves`` and ``cliffs`` are rows, ``(n, W)``."""
    return tuple(
        WorkerProfile(
            workers[rank].host,
            workers[rank].device,
            workers[rank].slot,
            workers[rank].name,
            tuple(curves[:, rank].tolist()),
            float(noise[rank]),
            int(steps[rank]),
            int(quanta[rank]),
            tuple(cliffs[:, rank].tolist()),
        )
        for rank in np.flatnonzero(steps > 0).tolist()
    )


def merged(
    older: Iterable[WorkerProfile], newer: Iterable[WorkerProfile]
) -> tuple[WorkerProfile, ...]:
    """Return both; a newer profile replaces the older one of the same worker."""
    by_place = {_place(profile): profile for profile in older}
    for profile in newer:
        by_place.pop(_place(profile), None)  # so that the latest are at the end
        by_place[_place(profile)] = profile
    return tuple(by_place.values())[-MOST_PROFILES:]


@dataclass(frozen=True, slots=True, eq=False)
class Recollection:
    """The stored times of ``n`` workers that a run has not measured."""

    ranks: IntArray  # of these workers, ``(n,)``
    curves: FloatArray  # rows of `CurveEstimates`, ``(5, n)``
    doubt: FloatArray  # relative standard deviation of each speed since then, ``(n,)``
    noise: FloatArray  # relative variance of one step's time, ``(n,)``
    steps: IntArray  # number of steps they are based on, ``(n,)``.
    quanta: IntArray  # samples of a wave, ``(n,)``.
    cliffs: FloatArray  # as in the profiles, ``(3, n)``


def recalled(
    steps: IntArray, workers: Sequence[WorkerPlace], known: Sequence[WorkerProfile]
) -> Recollection:
    """Return the stored times of workers that this run has not measured.

    A profile is used for several workers only if no other profile matches equally well. Among
    equal matches, the first worker in order of rank gets the first profile. Cost: ``O(W + P)`` for
    ``P`` profiles.
    """
    # Measurements of this run are newer than any profile.
    missing = [rank for rank in range(len(workers)) if not steps[rank]]
    found = _matched(missing, workers, known) if missing and known else {}
    profiles = [profile for profile, _ in found.values()]
    return Recollection(
        np.array(list(found), dtype=np.int64),
        np.array([profile.curve for profile in profiles]).reshape(-1, 5).T,
        np.array([doubt for _, doubt in found.values()]),
        np.array([profile.noise for profile in profiles]),
        np.array([profile.steps for profile in profiles], dtype=np.int64),
        np.array([profile.quantum for profile in profiles], dtype=np.int64),
        np.array([profile.cliff for profile in profiles]).reshape(-1, 3).T,
    )


def _keys(one: WorkerPlace) -> tuple[tuple[object, ...], ...]:
    """Return the keys for the same worker, a similar one on the same host, and one elsewhere."""
    # Without a fingerprint, similar devices cannot be recognised.
    if not one.device:
        return ((one.name,),)
    return (one.host, one.device, one.slot), (one.host, one.device), (one.device,)


def _place(profile: WorkerProfile) -> tuple[object, ...]:
    return _keys(profile)[0]


def _matched(
    missing: list[int], workers: Sequence[WorkerPlace], known: Sequence[WorkerProfile]
) -> dict[int, tuple[WorkerProfile, float]]:
    """Return a matching profile for each rank, with its uncertainty; best matches first."""
    # Unused profiles come first; if all are used, one that another worker of the kind has is better
    # than none.
    found: dict[int, tuple[WorkerProfile, float]] = {}
    used = set[int]()
    # All workers at one level before the next, so that a weak match never takes an exact place.
    for level, doubt in enumerate(_DOUBT):
        alike: dict[tuple[object, ...], list[int]] = {}
        for at in range(len(known) - 1, -1, -1):  # so that `pop` returns the first one first
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
    """Return the next unused profile, or the last one."""
    while len(there) > 1 and there[-1] in used:
        there.pop()
    return there[-1]
