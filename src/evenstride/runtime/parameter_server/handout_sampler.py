"""Samples of a worker in asynchronous modes: it loads the ranges that the first server assigns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from evenstride.core.sampling.draw import Draw
from evenstride.core.sampling.partition import EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import EpochOrder
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loading.seeding import Keys
from evenstride.runtime.parameter_server.server_worker import AsyncWorker

# Decisions apply at once: in these modes workers have no common step.
_LATEST = 1 << 62


class PieceSampler(StepSampler):
    """A batch sampler whose batches are the ranges assigned to a worker, of its current share.

    Its iterators end when all samples are assigned. `finished` is true if the epoch is over then.
    Otherwise, this worker still has untrained samples. It must ask again after training them,
    because samples of other workers may have been returned.
    """

    def __init__(
        self,
        order: EpochOrder,
        gate: DrawBarrier,
        rank: int,
        fit: MicroBatchLimits,
        *,
        free: AsyncWorker,
        seeded: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(order, gate, rank, fit, seeded=seeded, **more)
        self._free = free
        self._most_steps: int | None = None

    def begin(
        self, epoch: int, cursor: EpochCursor, step: int, limit: int | None, **more: Any
    ) -> None:
        """Start drawing in an epoch; samples drawn before are returned."""
        if cursor.position and cursor.position != self._free.position:
            raise ConfigError(
                f"the loaded state is in mid-epoch, after {cursor.position} samples, but this "
                "synchronisation mode starts with whole epochs; load a state that was saved at the "
                "end of an epoch"
            )
        # Without the limit: it is for all workers together, and the first server applies it.
        super().begin(epoch, cursor, step, None, **more)
        self.finished, self._most_steps = False, limit

    def left(self) -> None:
        """Return the drawn, untrained samples, so that other workers train them."""
        if not self.finished:
            self._free.release()

    def _next_step(self) -> tuple[Keys, ...]:
        share = self._gate.expected(_LATEST)[self._rank]
        asked_s = time.perf_counter()
        stretches = self._free.take(self._epoch, self._cursor.end, share, self._most_steps)
        self.own_s -= time.perf_counter() - asked_s  # waiting time, not busy time
        if not stretches:
            self.finished = stretches is None
            return ()
        indices = self._indices(np.concatenate([np.arange(*pair) for pair in stretches]))
        parts = self._fit.parts(range(len(indices)))
        draws = [
            Draw(
                step=self._step,
                window=len(indices),
                share=len(indices),
                samples=len(part),
                first=number == 0,
                last=number == len(parts) - 1,
                claimed=share,
            )
            for number, part in enumerate(parts)
        ]
        rows = [indices[part.start : part.stop] for part in parts]
        batches = tuple(keys for row in rows for keys in self._keys(row[np.newaxis]))
        self._drawn.extend(zip(draws, batches, strict=True))
        self._step += 1
        self._gate.rewind(self._step)
        return batches
