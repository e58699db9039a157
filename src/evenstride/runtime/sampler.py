"""Which samples this rank loads next, drawn ahead of training by the data loader."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstride.core.partition import EpochCursor, Piece, cut, micro_batches, step_shares
from evenstride.runtime.gate import Gate
from evenstride.runtime.seeding import Key, epoch_order, item_seeds


@dataclass(frozen=True, slots=True)
class Draw:
    """One (micro-)batch on its way to the training loop.

    Args:
        step: global index of its step.
        window: samples of the whole step over all ranks.
        share: samples of this rank in the step; 0 for a ghost.
        samples: samples in this micro-batch that count; 0 for a ghost.
        first: first micro-batch of this rank in the step.
        last: last one; its backward pass synchronises.
    """

    step: int
    window: int
    share: int
    samples: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Order:
    """How an epoch is laid out; the same on all ranks.

    Args:
        length: samples in the data set.
        seed: of the order and of the samples' randomness.
        shuffle: false to keep the data set's own order.
        drop_last: leave the last, incomplete global batch out.
    """

    length: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False


class StepSampler:
    """A batch sampler whose batches are this rank's part of each step.

    Every iterator over it continues where the last one stopped, so that the loader can start in
    the training process and go on in worker processes.

    Args:
        order: layout of the epochs.
        gate: tells each step's shares, and waits where they are not decided.
        rank: this rank.
        max_micro_batch: most samples per batch; ``None`` for no limit.
        sizes: global batches to use instead, step by step, until they end (calibration).
    """

    def __init__(
        self,
        order: Order,
        gate: Gate,
        rank: int,
        max_micro_batch: int | None,
        sizes: Iterator[int] | None = None,
    ) -> None:
        self.order, self.own_s = order, 0.0
        self._gate, self._rank, self._max_micro_batch = gate, rank, max_micro_batch
        self._sizes = sizes
        self._drawn: deque[Draw] = deque()
        self._positions: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._epoch, self._step, self._limit = -1, 0, 0
        self._cursor = EpochCursor(order.length, 1)

    def __len__(self) -> int:
        return self._cursor.steps

    def begin(self, epoch: int, cursor: EpochCursor, step: int, limit: int | None) -> None:
        """Start drawing at a committed position; whatever was drawn before is forgotten.

        Args:
            epoch: decides the order of the samples.
            cursor: position in the epoch.
            step: global index of the next step.
            limit: step to stop before; ``None`` for no limit.
        """
        if epoch != self._epoch:
            order = self.order
            self._positions = epoch_order(order.seed, epoch, order.length, shuffle=order.shuffle)
            self._epoch = epoch
        self._drawn.clear()
        self._cursor, self._step = cursor, step
        self._limit = -1 if limit is None else limit
        self._gate.rewind(step)

    def delivered(self) -> Draw:
        """Return the draw of the batch that the loader hands out now."""
        return self._drawn.popleft()

    def __iter__(self) -> Iterator[list[Key]]:
        while not self._exhausted() and self._resize():
            waited_s, started_s = self._gate.waited_s, time.perf_counter()
            batches = self._next_step()
            waited_s = self._gate.waited_s - waited_s
            self.own_s += time.perf_counter() - started_s - waited_s
            yield from batches

    def _exhausted(self) -> bool:
        return self._cursor.done or self._step == self._limit

    def _resize(self) -> bool:
        """Set the size of the next step; return whether there is to be one."""
        if self._sizes is None:
            return True
        size = next(self._sizes, 0)
        self._cursor = replace(self._cursor, global_batch=max(size, 1))
        return size > 0

    def _next_step(self) -> list[list[Key]]:
        """Draw one step: note its batches as drawn, and return their keys."""
        shares = self._gate.draw(self._step)
        window = self._cursor.window
        piece = cut(window, step_shares(shares, len(window)))[self._rank]
        parts = micro_batches(piece.positions, self._max_micro_batch)
        self._note(piece, parts, len(window))
        self._cursor, self._step = self._cursor.commit(len(window)), self._step + 1
        return [self._keys(part) for part in parts]

    def _note(self, piece: Piece, parts: tuple[range, ...], window: int) -> None:
        for number, part in enumerate(parts):
            self._drawn.append(
                Draw(
                    step=self._step,
                    window=window,
                    share=piece.samples,
                    samples=0 if piece.ghost else len(part),
                    first=number == 0,
                    last=number == len(parts) - 1,
                )
            )

    def _keys(self, part: range) -> list[Key]:
        indices = self._positions[part.start : part.stop]
        seeds = item_seeds(self.order.seed, self._epoch, indices)
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))
