"""Which samples a worker loads next where workers do not keep step: what it is given, in turn."""

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

# Decisions are in force as soon as they are known: no step is the same for two workers.
_LATEST = 1 << 62


class PieceSampler(StepSampler):
    """A batch sampler whose batches are the pieces that a worker is given, of its present share.

    Its iterators end when nothing is left to be given; whether the epoch is over then is told by
    `finished`. If it is not, this worker has pieces in hand, and is to ask again once it has
    trained them: some of other workers' may have come back.
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
        """Start drawing in an epoch; whatever was drawn before goes back."""
        if cursor.position and cursor.position != self._free.position:
            raise ConfigError(
                f"the state that was loaded is of mid-epoch, {cursor.position} samples in, and "
                "workers that do not keep step begin with whole epochs; load one that was saved "
                "where an epoch had ended"
            )
        # Without the limit, which is over all workers: the first server counts towards it.
        super().begin(epoch, cursor, step, None, **more)
        self.finished, self._most_steps = False, limit

    def left(self) -> None:
        """Give back what is drawn and not trained, for others to train."""
        if not self.finished:
            self._free.release()

    def _next_step(self) -> tuple[Keys, ...]:
        share = self._gate.expected(_LATEST)[self._rank]
        asked_s = time.perf_counter()
        stretches = self._free.take(self._epoch, self._cursor.end, share, self._most_steps)
        self.own_s -= time.perf_counter() - asked_s  # waiting, not work
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
