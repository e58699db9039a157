"""The ranks of a generation, and those of them that serve: the workers of its fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from evenstride.core.fleet import Fleet, Worker
from evenstride.core.time_model.observation import Measurements

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Roster:
    """All ranks, of which some get no samples.

    Policies and estimates know the fleet of those who serve only, so none has to know of leaving.
    """

    workers: tuple[Worker, ...]  # of all ranks, in rank order
    serving: tuple[int, ...]  # the ranks that get samples, ascending

    @classmethod
    def whole(cls, workers: tuple[Worker, ...]) -> Roster:
        """Return the roster in which all serve."""
        return cls(workers, tuple(range(len(workers))))

    @property
    def all_serve(self) -> bool:
        """Whether no rank is left out."""
        return len(self.serving) == len(self.workers)

    def fleet(self, global_batch: int) -> Fleet:
        """Return the fleet of those who serve.

        Raises:
            InfeasibleShares: they cannot hold the global batch.
        """
        return Fleet(tuple(self.workers[rank] for rank in self.serving), global_batch)

    def spread(self, values: tuple[T, ...], nothing: T) -> tuple[T, ...]:
        """Return a value for each rank, given those of the fleet."""
        if self.all_serve:
            return values
        of_ranks = [nothing] * len(self.workers)
        for rank, value in zip(self.serving, values, strict=True):
            of_ranks[rank] = value
        return tuple(of_ranks)

    def inward(self, measured: Measurements) -> Measurements:
        """Return what those who serve measured, numbered as in the fleet."""
        if self.all_serve:
            return measured
        places = np.full(len(self.workers), -1, dtype=np.int64)
        places[list(self.serving)] = np.arange(len(self.serving))
        # A negative rank would count from the end.
        known = (measured.worker >= 0) & (measured.worker < len(places))
        at = np.where(known, places[np.where(known, measured.worker, 0)], -1)
        return measured.renumbered(at).only(at >= 0)
