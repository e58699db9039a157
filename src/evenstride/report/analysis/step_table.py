"""The times of every worker in every step, as columns that grow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.time_model.observation import Measurements

_FIRST_ROOM = 256
_MOST_CELLS = 4e8
"""A step beyond that many times of all workers is not believed: it would not fit into memory."""


class StepTable:
    """Steps of one generation of workers; rows are steps, columns workers.

    What nobody has told of is not a number, and a share of -1.
    """

    def __init__(self, first: int, workers: int) -> None:
        self.first, self.workers = first, workers
        self._count = 0
        self._times = np.full((_FIRST_ROOM, 4, workers), np.nan)
        self._share = np.full((_FIRST_ROOM, workers), -1, dtype=np.int64)
        self._modelled = np.zeros((_FIRST_ROOM, workers), dtype=np.bool_)

    def __len__(self) -> int:
        return self._count

    @property
    def busy_s(self) -> FloatArray:
        """Own work: data, compute and the usual time between steps, ``(steps, workers)``."""
        return self._times[: self._count, 0]

    @property
    def wait_s(self) -> FloatArray:
        """The rest of a step: waiting for others, and communication, ``(steps, workers)``."""
        return self._times[: self._count, 1]

    @property
    def data_s(self) -> FloatArray:
        """Of the busy time, waiting for data: the mean of its observation."""
        return self._times[: self._count, 2]

    @property
    def apart_s(self) -> FloatArray:
        """Evaluation, saving, waiting for decisions: what an observation had, in its first step."""
        return self._times[: self._count, 3]

    @property
    def share(self) -> IntArray:
        """Samples, ``(steps, workers)``."""
        return self._share[: self._count]

    @property
    def modelled(self) -> npt.NDArray[np.bool_]:
        """Whether a step says something about a worker's speed, ``(steps, workers)``."""
        return self._modelled[: self._count]

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Which steps all workers have told of, ``(steps,)``."""
        return np.asarray(~np.isnan(self.busy_s).any(axis=1))

    def add(self, measured: Measurements) -> int:
        """Take what was measured; return how many observations were of no step there can be."""
        left_out = 0
        for seen in measured:
            at = seen.first_step - self.first
            sound = 0 <= seen.worker < self.workers and at >= 0
            if not sound or not self._room(at + seen.steps):
                left_out += 1
                continue
            rows = slice(at, at + seen.steps)
            self._times[rows, 0, seen.worker] = seen.busy_s
            self._times[rows, 1, seen.worker] = seen.wait_s
            self._times[rows, 2, seen.worker] = seen.data_s / max(seen.steps, 1)
            self._times[rows, 3, seen.worker] = 0.0
            self._times[at, 3, seen.worker] = seen.outside_s + seen.control_wait_s
            self._share[rows, seen.worker] = seen.share
            self._modelled[rows, seen.worker] = seen.modelled
            self._count = max(self._count, at + seen.steps)
        return left_out

    def _room(self, rows: int) -> bool:
        """Make room for some steps; return whether there can be so many."""
        have = len(self._share)
        if rows <= have:
            return True
        # What is told of comes in order, give or take what ranks are apart.
        if rows > 2 * self._count + 100_000 or 4.0 * rows * self.workers > _MOST_CELLS:
            return False
        more = max(rows, 2 * have) - have
        self._times = np.concatenate([self._times, np.full((more, 4, self.workers), np.nan)])
        self._share = np.concatenate([self._share, np.full((more, self.workers), -1)])
        self._modelled = np.concatenate(
            [self._modelled, np.zeros((more, self.workers), dtype=np.bool_)]
        )
        return True
