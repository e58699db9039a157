"""Which samples this rank loads next; the data loader draws them ahead of training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import Shares
from evenstride.core.sampling.draw import Draw, ShardAssignment
from evenstride.core.sampling.partition import (
    EpochCursor,
    EpochParts,
    Piece,
    cut,
    cut_by_cost,
    numbered_micro_batches,
    step_shares,
)
from evenstride.core.sampling.permutation import Permutation
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.loading.loader_options import Costs
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import EpochOrder
from evenstride.runtime.loading.seeding import Keys, WindowKey, item_seeds

# Fewest and most steps planned at once: enough for the code to run warm, few enough to discard.
_AHEAD = 8, 64
# Samples planned at once after plans were discarded, because splits may move again soon; then twice
# as many each time. Planning this many takes about twice as long as planning one.
_SAMPLES = 1024


class _Planned(NamedTuple):
    """A step as it will be drawn if its shares are the expected ones."""

    shares: Shares
    window: int
    draws: tuple[Draw, ...]
    batches: tuple[Keys, ...]


class StepSampler:
    """A batch sampler whose batches are this rank's part of each step.

    Each iterator over it continues where the previous one stopped. So the loader can start in the
    training process and continue in loader processes.

    Steps are planned some way ahead, with the shares known at that time. A plan is discarded if its
    step is drawn with other shares. Planning is done in bulk because between training steps Python
    runs with cold caches, several times slower than code that runs many times in a row.
    """

    def __init__(
        self,
        order: EpochOrder,
        gate: DrawBarrier,
        rank: int,
        fit: MicroBatchLimits,
        *,
        seeded: bool = True,  # whether keys have a seed for the sample's randomness
        sizes: Iterator[int] | None = None,  # global batches of a calibration
        costs: Costs | None = None,
        bucketed: bool = False,  # whether a rank's samples of a step are ordered by cost
    ) -> None:
        self._costs, self._bucketed, self._revision = costs, bucketed, fit.revision
        self.order, self.own_s = order, 0.0
        self._gate, self._rank, self._fit = gate, rank, fit
        self._seeded, self._sizes = seeded, sizes
        self._drawn: deque[tuple[Draw, Keys]] = deque()
        self._plan: deque[_Planned] = deque()
        self._ahead = _AHEAD[1]  # steps to plan next time
        self._shuffle: Permutation | None = None
        self._parts: EpochParts | None = None
        self.parts_end = 0
        self._dealing: ShardAssignment | None = None
        self._epoch, self._step, self._limit, self._whole_step = -1, 0, -1, -1
        self._cursor, self._position = EpochCursor(order.length, 1), 0

    def __len__(self) -> int:
        return self._cursor.steps

    def begin(
        self,
        epoch: int,
        cursor: EpochCursor,
        step: int,
        limit: int | None,  # step to stop before
        *,
        whole_first: bool = False,  # no rank splits the first step into micro-batches
        parts: Shares = (),  # shares that split the data set at the start of this epoch
        parts_end: int = 0,  # position from which other ranks train the rest; 0 for none
        dealing: ShardAssignment | None = None,  # the rest of the shards at this position
    ) -> None:
        """Start drawing at a committed position; forget what was drawn before."""
        if epoch != self._epoch:
            order = self.order
            shuffled = order.shuffle and not order.shards and not order.windows
            self._shuffle = Permutation(order.length, order.seed, epoch) if shuffled else None
            self._epoch = epoch
        self._drawn.clear()
        self._plan.clear()
        self._cursor, self._position, self._step = cursor, cursor.position, step
        if self.order.by_epoch and parts and cursor.position:
            self._parts, self.parts_end = self._cut_by(parts), parts_end
        self._dealing = dealing
        self._limit = -1 if limit is None else limit
        self._whole_step = step if whole_first else -1
        self._gate.rewind(step)

    def regroup(self, gate: DrawBarrier, rank: int) -> None:
        """Draw the part of another rank, with another draw barrier, from the next `begin` on."""
        self._gate, self._rank = gate, rank

    @property
    def parts(self) -> Shares:
        """The shares that split the data set for this epoch; empty if it is not split."""
        return () if self._parts is None else self._parts.shares

    finished = True  # whether the epoch is over when an iterator ends

    def left(self) -> None:
        """Note that the loop has ended: what was drawn but not trained will be drawn again."""

    def delivered(self) -> tuple[Draw, Keys]:
        """Return draw and keys of the batch that the loader yields now."""
        return self._drawn.popleft()

    def __iter__(self) -> Iterator[Keys]:
        if self._epoch < 0:  # none of our loops has begun
            raise usage_errors.drawn_elsewhere()
        while self._step != self._limit:
            started_s, waited_s = time.perf_counter(), self._gate.waited_s
            batches = self._next_step()
            waited_s = self._gate.waited_s - waited_s
            self.own_s += time.perf_counter() - started_s - waited_s
            if not batches:
                return
            yield from batches

    def _next_step(self) -> tuple[Keys, ...]:
        """Draw one step: note its batches as drawn, and return their keys; empty at the end."""
        outdated = self._revision != self._fit.revision
        if (outdated or not self._plan) and not self._plan_ahead(None):
            return ()
        shares = self._kept(self._gate.draw(self._step))
        # Identity suffices: the schedule returns the same tuple until a decision.
        if self._plan[0].shares is not shares:
            least, most = _AHEAD
            self._ahead = min(max(least, _SAMPLES // max(shares[self._rank], 1)), most)
            self._plan_ahead(shares)
        planned = self._plan.popleft()
        self._drawn.extend(zip(planned.draws, planned.batches, strict=True))
        self._position, self._step = self._position + planned.window, self._step + 1
        self._dealing = planned.draws[0].dealing
        return planned.batches

    def _plan_ahead(self, shares: Shares | None) -> bool:
        """Plan the next steps, with ``shares`` or the expected ones; ``False`` at the end."""
        self._plan.clear()
        self._revision = self._fit.revision
        self._cursor = cursor = self._sized(replace(self._cursor, position=self._position))
        self._position = cursor.position
        if cursor.done:
            return False
        shares = shares or self._kept(self._gate.expected(self._step))
        if self.order.by_epoch and not self._position:
            self._parts, self.parts_end = self._cut_by(shares), 0
        if not self._position:  # also when a calibration starts the epoch again
            self._dealing = self.order.dealing(self._epoch)
        self._fit.check(step_shares(shares, len(cursor.window)))
        # Such steps depend on a decision or on the step before, so only one can be planned.
        one = self._sizes is not None or self._gate.opening or self._dealing is not None
        count = 1 if one else self._ahead
        self._ahead = min(2 * self._ahead, _AHEAD[1])
        alike = min(count, (cursor.end - cursor.position) // cursor.global_batch)
        if alike and self._sizes is None and self._in_one(shares[self._rank]):
            self._plan.extend(self._planned_alike(shares, alike))
        else:
            self._plan.append(self._planned(shares))
        return True

    def _kept(self, shares: Shares) -> Shares:
        """Return the next step's shares: those of the epoch's start if the data set is split."""
        split = self._parts is not None and self._position and not self.parts_end
        return self._parts.shares if self._parts is not None and split else shares

    def _cut_by(self, shares: Shares) -> EpochParts:
        order = self.order
        return EpochParts(order.length, sum(shares), shares, order.seed, self._epoch, order.shuffle)

    def _in_one(self, share: int) -> bool:
        plain = self._costs is None and self._dealing is None
        one = (self._fit.number or 1) == 1 and len(self._fit.parts(range(share))) == 1
        return share > 0 and plain and one

    def _planned_alike(self, shares: Shares, count: int) -> Iterator[_Planned]:
        """Yield the plans of ``count`` full steps of one batch each, all with the same split."""
        cursor, share, batch = self._cursor, shares[self._rank], self._cursor.global_batch
        before = sum(shares[: self._rank])
        begins = cursor.position + batch * np.arange(count)
        starts = begins + before
        mine = self._indices((starts[:, np.newaxis] + np.arange(share)).ravel())
        rows, windows = mine.reshape(count, share), [range(s, s + batch) for s in begins]
        for step, keys in enumerate(self._keys(rows, windows), start=self._step):
            draw = Draw(step, batch, share, share, True, True, trained=share)
            yield _Planned(shares, batch, (draw,), (keys,))

    def _sized(self, cursor: EpochCursor) -> EpochCursor:
        """Return the cursor with the next size of a calibration; at its end after the last."""
        if self._sizes is None:
            return cursor
        size = min(next(self._sizes, 0), cursor.end)
        if not size:
            return replace(cursor, length=0)
        # Every step has its full size: if too few samples are left, the epoch starts again.
        position = cursor.position if cursor.position + size <= cursor.end else 0
        return replace(cursor, global_batch=size, position=position)

    def _planned(self, shares: Shares) -> _Planned:
        window = self._cursor.window
        of_step = step_shares(shares, len(window))
        piece, parts, mine, dealing = self._pieces(window, of_step)
        draws = tuple(
            Draw(
                step=self._step,
                window=len(window),
                share=of_step[self._rank],
                samples=0 if piece.ghost else len(part),
                first=number == 0,
                last=number == len(parts) - 1,
                dealing=dealing,
                trained=piece.samples,
            )
            for number, part in enumerate(parts)
        )
        first = piece.positions.start
        # An empty micro-batch has a sample too, because its rank must take part.
        rows = [
            mine[part.start - first : part.stop - first] if part else mine[:1] for part in parts
        ]
        batches = tuple(keys for row in rows for keys in self._keys(row[np.newaxis], [window]))
        return _Planned(shares, len(window), draws, batches)

    def _pieces(
        self, window: range, shares: Shares
    ) -> tuple[Piece, tuple[range, ...], npt.NDArray[np.int64], ShardAssignment | None]:
        dealing = self._dealing
        if self._costs is None:
            piece = cut(window, shares)[self._rank]
            if dealing is not None:
                dealing, mine = dealing.step(self._step, shares, self._rank)
            else:
                mine = self._indices(np.arange(piece.positions.start, piece.positions.stop))
            parts = self._fit.parts(piece.positions)
        else:
            # Each rank needs the costs of all ranks' samples, because the split depends on all.
            indices = self._indices(np.arange(window.start, window.stop))
            costs = self._costs.of(indices)
            piece = cut_by_cost(window, shares, costs)[self._rank]
            first, last = piece.positions.start - window.start, piece.positions.stop - window.start
            mine, costs = indices[first:last], costs[first:last]
            if self._bucketed:
                # Not before the split: one rank would always get the longest samples.
                by_cost = np.argsort(costs, kind="stable")
                mine, costs = mine[by_cost], costs[by_cost]
            parts = self._fit.parts_by_cost(piece.positions, costs, padded=self._bucketed)
        whole = piece.ghost or self._step == self._whole_step
        number = self._fit.batches_in(len(window), self._cursor.global_batch)
        if number is not None and self._step != self._whole_step:
            ghosts = (piece.positions,) * number
            parts = ghosts if piece.ghost else numbered_micro_batches(piece.positions, number)
            return piece, parts, mine, dealing
        return piece, (piece.positions,) if whole else parts, mine, dealing

    def _indices(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._parts is not None and self.parts_end:
            return self._parts.left(self.parts_end, positions)
        if self._parts is not None:
            return self._parts.indices(self._rank, positions)
        return positions if self._shuffle is None else self._shuffle.at(positions)

    def _keys(self, indices: npt.NDArray[np.int64], windows: Sequence[range] = ()) -> list[Keys]:
        """Return the keys of batches: one row of indices each, of one window each."""
        if self.order.windows:
            return [
                [WindowKey(self._epoch, int(w.start), int(w.stop), place) for place in row]
                for w, row in zip(windows, indices.tolist(), strict=True)
            ]
        if not self._seeded:
            return list(indices.tolist())
        seeds = item_seeds(self.order.seed, self._epoch, indices).tolist()
        pairs = zip(indices.tolist(), seeds, strict=True)
        return [list(zip(row, row_seeds, strict=True)) for row, row_seeds in pairs]
