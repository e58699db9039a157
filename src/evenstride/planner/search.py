"""Look for the clusters that no other beats in time and cost, over mixes of two kinds and batches.

First all are looked at roughly (see `least_step_s`), pair by pair of kinds, and only those stay
that no other is both quicker and cheaper than: whatever the objective, and however deadline and
budget cut, one of these is best. Then they are judged exactly, with integer shares. The rough
figure is never above the exact one but for noise, so what the best rough figure leaves to gain is
told as the *gap*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.planner.kinds import Kind, by_place, undominated
from evenstride.planner.outlook import Choice, Outlook, Task, outlook
from evenstride.planner.steps import lateness, least_step_s
from evenstride.planner.stretching import mean_stretches

_MOST_EXACT = 400  # choices that are judged exactly


@dataclass(frozen=True, slots=True)
class Space:
    """What is looked at.

    Args:
        kinds: that may be rented.
        batches: global batches in samples, at least one.
        most_machines: in a cluster, at least 1.
        mixed: whether two kinds may be in one.
    """

    kinds: tuple[Kind, ...]
    batches: tuple[int, ...]
    most_machines: int = 32
    mixed: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Args:
        outlooks: that no other beats in time and cost, the quickest first.
        looked_at: choices, roughly.
        least_s: no choice is quicker, but for noise; infinite if there is none.
        least_usd: none is cheaper.
    """

    outlooks: tuple[Outlook, ...]
    looked_at: int
    least_s: float
    least_usd: float


@dataclass(frozen=True, slots=True, eq=False)
class _Rough:
    """Choices as arrays of ``(n,)`` each.

    Args:
        pair: of kinds, by its number.
        counts: machines of both, ``(2, n)``.
        batches: in samples.
        time_s: of the whole training.
        usd: the same.
    """

    pair: IntArray
    counts: IntArray
    batches: IntArray
    time_s: FloatArray
    usd: FloatArray

    def best(self) -> _Rough:
        """Return those that no other is both quicker and cheaper than, the quickest first."""
        order = np.lexsort((self.usd, self.time_s))
        order = order[np.isfinite(self.time_s[order])]
        usd = self.usd[order]
        before = np.concatenate([[inf], np.minimum.accumulate(usd)[:-1]])
        which = order[usd < before]
        return _Rough(
            self.pair[which],
            self.counts[:, which],
            self.batches[which],
            self.time_s[which],
            self.usd[which],
        )

    @classmethod
    def none(cls) -> _Rough:
        """Return no choice."""
        ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(ints, np.zeros((2, 0), dtype=np.int64), ints, floats, floats)

    def with_better(self, other: _Rough) -> _Rough:
        """Return the best of these, which are best among themselves, and of others."""
        # Most others are beaten, which is quicker to see than to sort them in.
        quicker = np.searchsorted(self.time_s, other.time_s, side="right")
        least_usd = np.concatenate([[inf], self.usd])[quicker]
        better = np.flatnonzero(other.usd < least_usd)
        if not len(better):
            return self
        both = (
            np.concatenate([mine, its[..., better]], axis=-1)
            for mine, its in (
                (self.pair, other.pair),
                (self.counts, other.counts),
                (self.batches, other.batches),
                (self.time_s, other.time_s),
                (self.usd, other.usd),
            )
        )
        return _Rough(*both).best()


def search(space: Space, task: Task) -> Found:
    """Return the best choices of a space.

    Cost:
        Vectorised; ``O(pairs * machines^2 * batches)`` for the pairs of kinds in a place that no
        other kind beats in everything.
    """
    batches = [batch for batch in space.batches if task.epochs.at(batch) is not None]
    pairs = [
        pair
        for kinds in by_place(space.kinds).values()
        for pair in combinations_with_replacement(undominated(kinds), 2)
        if space.mixed or pair[0] is pair[1]
    ]
    if not batches or not pairs:
        return Found((), 0, inf, inf)
    grid = _Grid.of(batches, space, task)
    looked_at, best = 0, _Rough.none()
    for number, pair in enumerate(pairs):
        rough = _rough(number, pair, grid, task)
        looked_at += len(rough.time_s)
        best = best.with_better(rough)
    if not len(best.time_s):
        return Found((), looked_at, inf, inf)
    judged = [outlook(choice, task) for choice in _choices(best, pairs)]
    return Found(
        frontier([one for one in judged if one is not None]),
        looked_at,
        float(best.time_s.min()),
        float(best.usd.min()),
    )


def frontier(outlooks: Iterable[Outlook]) -> tuple[Outlook, ...]:
    """Return the outlooks that no other beats in expected time and cost, the quickest first."""
    kept: list[Outlook] = []
    for one in sorted(outlooks, key=lambda o: (o.time_s.value, o.cost_usd.value)):
        if not kept or one.cost_usd.value < kept[-1].cost_usd.value:
            kept.append(one)
    return tuple(kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Numbers of machines crossed with batches, of one kind and of two; and what batches take.

    Args:
        alone: machines of one kind, and batches, ``(3, n)`` with none of a second kind.
        both: machines of two kinds, and batches, ``(3, n)``.
        steps_alone: of the whole training with each of ``alone``.
        steps_both: the same of ``both``.
        late: by how many deviations the last of so many workers is late.
        reduce_s: what an all-reduce of so many takes.
    """

    alone: IntArray
    both: IntArray
    steps_alone: FloatArray
    steps_both: FloatArray
    late: FloatArray
    reduce_s: FloatArray

    @classmethod
    def of(cls, batches: Sequence[int], space: Space, task: Task) -> _Grid:
        """Return the grid of a space."""
        machines = np.arange(1, space.most_machines + 1)
        one, two = (axis.ravel() for axis in np.meshgrid(machines, machines, indexing="ij"))
        few = one + two <= space.most_machines
        most = space.most_machines * max(kind.workers for kind in space.kinds)
        steps, ring = np.array([_steps(batch, task) for batch in batches]), task.ring
        return cls(
            _crossed(np.stack([machines, np.zeros_like(machines)]), batches),
            _crossed(np.stack([one[few], two[few]]), batches),
            np.repeat(steps, len(machines)),
            np.repeat(steps, int(few.sum())),
            lateness(most),
            np.array([ring.all_reduce_s(n) if n > 1 else 0.0 for n in range(most + 1)]),
        )


def _crossed(counts: IntArray, batches: Sequence[int]) -> IntArray:
    tiled = np.tile(counts, (1, len(batches)))
    return np.concatenate([tiled, np.repeat(np.array(batches), counts.shape[1])[np.newaxis]])


def _steps(batch: int, task: Task) -> float:
    epochs = task.epochs.at(batch)
    return inf if epochs is None else epochs.value * -(-task.samples // batch)


def _rough(number: int, pair: tuple[Kind, Kind], grid: _Grid, task: Task) -> _Rough:
    one, two = pair
    cells, steps = (grid.alone, grid.steps_alone) if one is two else (grid.both, grid.steps_both)
    machines, batches = cells[:2], cells[2]
    workers = machines * np.array([[one.workers], [two.workers]])
    most = (one.most_samples or inf, two.most_samples or inf)
    compute_s = least_step_s(one.curve, two.curve, workers, batches, most)
    together = workers.sum(axis=0)
    noise = min(one.curve.noise, two.curve.noise)
    step_s = compute_s * (1.0 + noise * grid.late[together]) + grid.reduce_s[together]
    time_s = steps * step_s
    if one.spot or two.spot:
        time_s *= mean_stretches(task.saves, one.transience, two.transience, machines)
    per_h = one.usd_per_h.value * machines[0] + two.usd_per_h.value * machines[1]
    usd = time_s / 3600.0 * per_h
    return _Rough(np.full(len(batches), number), machines, batches, time_s, usd)


def _choices(best: _Rough, pairs: Sequence[tuple[Kind, Kind]]) -> Iterator[Choice]:
    """Yield the choices, at most `_MOST_EXACT` of them, evenly chosen with both ends."""
    some = np.unique(np.linspace(0, len(best.pair) - 1, _MOST_EXACT).round().astype(np.int64))
    columns = (best.pair, *best.counts, best.batches)
    for number, one, two, batch in zip(*(c[some].tolist() for c in columns), strict=True):
        pair = pairs[number]
        yield Choice(pair, (one, two), batch) if two else Choice(pair[:1], (one,), batch)
