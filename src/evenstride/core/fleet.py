"""The workers of one generation, and the bounds of their shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask, Shares
from evenstride.errors import ConfigError, InfeasibleShares

# Also exports the types of its arrays.
__all__ = [
    "Fleet",
    "FloatArray",
    "IntArray",
    "Mask",
    "Shares",
    "Worker",
    "as_array",
    "as_shares",
]


@dataclass(frozen=True, slots=True)
class Worker:
    """One data-parallel worker as it was when its generation formed.

    Args:
        name: unique in the fleet: host and rank, for display.
        min_share: fewest samples in a full step.
        max_share: most samples that fit into a step (memory); ``None`` means no limit.
        cores: CPU cores that it may use, if known (may be fractional).
        flops_per_s: its measured speed on a matrix product, if known.
        quantum: its full shares are multiples of this many samples, at least 1: a whole
            micro-batch. `Fleet` states the one exception. 1 allows any share. ``None`` does too,
            and waves found in its times decide which shares are best.
        device: fingerprint of the device that computes its steps; empty if not known.
        slot: its number among its host's workers; ``None`` if not known.
    """

    name: str
    min_share: int = 1
    max_share: int | None = None
    cores: float | None = None
    flops_per_s: float | None = None
    quantum: int | None = None
    device: str = ""
    slot: int | None = None

    @property
    def host(self) -> str:
        """The part of its name that precedes the rank."""
        return self.name.rpartition("/")[0]

    @property
    def multiple(self) -> int:
        """The number that its full shares must be multiples of."""
        return 1 if self.quantum is None else self.quantum

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(
                f"worker {self.name}: quantum is {self.quantum}, but it must be at least 1; use 1 "
                "to allow any share, or None to find it"
            )
        if self.min_share < 1:
            raise ConfigError(
                f"worker {self.name}: min_share is {self.min_share}, but it must be at least 1"
            )
        if self.max_share is not None and self.max_share < self.min_share:
            raise ConfigError(
                f"worker {self.name}: max_share {self.max_share} is below min_share "
                f"{self.min_share}; raise max_share or lower min_share"
            )


@dataclass(frozen=True, slots=True)
class Fleet:
    """``W`` workers that split one global batch of ``B`` samples.

    ``lower`` and ``upper`` are the inclusive bounds of the shares, int64 of shape ``(W,)``.
    Shares are multiples of each worker's ``quanta``, int64 ``(W,)``, read-only. The exception is
    one worker that takes the remainder of ``B``.

    Raises:
        InfeasibleShares: ``B`` lies outside the sum of the bounds.
    """

    workers: tuple[Worker, ...]
    global_batch: int
    lower: IntArray = field(init=False, repr=False, compare=False)
    upper: IntArray = field(init=False, repr=False, compare=False)
    quanta: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lower = np.array([w.min_share for w in self.workers], dtype=np.int64)
        upper = np.array(
            [self.global_batch if w.max_share is None else w.max_share for w in self.workers],
            dtype=np.int64,
        )
        quanta = np.array([w.multiple for w in self.workers], dtype=np.int64)
        most = np.minimum(upper, max(self.global_batch, 1))
        for name, values in (("quanta", quanta), ("lower", lower), ("upper", most)):
            values.flags.writeable = False  # splits of equal fleets are cached
            object.__setattr__(self, name, values)
        if not int(lower.sum()) <= self.global_batch <= int(upper.sum()):
            unlimited = any(w.max_share is None for w in self.workers)
            raise InfeasibleShares(
                total=self.global_batch,
                at_least=int(lower.sum()),
                at_most=None if unlimited else int(upper.sum()),
                workers=len(self.workers),
                fewest=sorted({w.min_share for w in self.workers}),
                most=sorted({int(n) for n in upper if n < self.global_batch}),
            )

    def __len__(self) -> int:
        return len(self.workers)

    def __hash__(self) -> int:
        # Without the workers themselves: hashing thousands would cost more than what is cached.
        return hash((len(self.workers), self.global_batch))


@lru_cache(maxsize=4)
def as_array(shares: Shares) -> IntArray:
    """Return shares as an int64 array, ``(W,)``; read-only, because it is cached."""
    array = np.fromiter(shares, dtype=np.int64, count=len(shares))
    array.flags.writeable = False
    return array


def as_shares(array: IntArray) -> Shares:
    """Return the plain tuple of ints that decisions and traces carry."""
    return tuple(array.tolist())
