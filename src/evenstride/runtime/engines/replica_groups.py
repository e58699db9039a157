"""Islands: ranks that wait for each other in every layer, balanced as one worker.

With HSDP the ranks of one shard group gather each other's parameters before every layer, so none
can be ahead of the others. What can be balanced is the group. The core sees islands as its workers:
what the ranks measured is folded into what each island did, and an island's share is spread evenly
over its ranks. The weighted gradient is exact for any split.

An island's busy time is the largest of its members'. That is a lower bound, as members may be the
slowest in turn, in one layer and another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, lcm, nan
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch import nn

from evenstride.core.fleet import Shares, Worker
from evenstride.core.time_model.observation import Measurements, PeakMemory
from evenstride.errors import ConfigError
from evenstride.runtime.engines.fsdp import island_of
from evenstride.runtime.timing.recorder import in_columns, stretches
from evenstride.runtime.timing.step_timer import StepRecord

logger = logging.getLogger("evenstride")

_MOST_HOSTS = 3  # named in full
_FIX = 'give Stride(shard_group=mesh["shard"].get_group()) on every rank'
# Steps that some member has not told of yet. Ranks are a few steps apart, an exchange at most 512.
_MOST_PENDING = 4096


class Fold:
    """Makes of what ranks have measured what their islands did, one exchange after the other."""

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self._pending: list[dict[int, dict[int, _IslandStep]]] = [{} for _ in islands.members]
        self._latest = [-1] * islands.size
        self._pace = [1.0] * islands.size

    def take(self, told: Sequence[Measurements]) -> Measurements:
        """Return what the islands measured, each step of an island once.

        Each rank has ``told`` what it measured since the last call, steps ascending. Costs some
        2 us for each step of each rank.
        """
        seen: list[Measurements] = []
        for island, (members, pending) in enumerate(
            zip(self._islands.members, self._pending, strict=True)
        ):
            for rank in members:
                for step in _steps(told[rank]):
                    number = step.record.step
                    pending.setdefault(number, {})[rank] = step
                    self._latest[rank] = max(self._latest[rank], number)
            # A step of an island is known once all its members have told of it; the others wait.
            whole = sorted(step for step, by in pending.items() if len(by) == len(members))
            rows = [pending.pop(step) for step in whole]
            self._forget(pending, members)
            self._pace_of(members, rows)
            seen.append(_measured(island, [_folded([row[r] for r in members]) for row in rows]))
        return Measurements.joined(seen)

    def expected(self, expected_s: Sequence[float]) -> tuple[float, ...]:
        """Return every rank's expected busy time, given the islands'; of no values none."""
        # A member is busy for its usual part of its island's time. Else one that is faster than the
        # slowest would be outside its band at all times, and ask for one exchange after the other.
        pairs = zip(self._islands.each(expected_s), self._pace, strict=bool(expected_s))
        return tuple(round(one_s * pace, 7) for one_s, pace in pairs)

    def _pace_of(self, members: Sequence[int], rows: list[dict[int, _IslandStep]]) -> None:
        good = [row for row in rows if all(_usual(step.record) for step in row.values())]
        whole_s = sum(max(step.record.busy_s for step in row.values()) for row in good)
        for rank in members if good else ():
            self._pace[rank] = sum(row[rank].record.busy_s for row in good) / whole_s

    def _forget(self, pending: dict[int, dict[int, _IslandStep]], members: Sequence[int]) -> None:
        """Drop the steps that are never told of by all: a rank tells of its steps in order."""
        told_by_all = min(self._latest[rank] for rank in members)
        for step in [step for step in pending if step <= told_by_all]:
            del pending[step]
        for step in sorted(pending)[:-_MOST_PENDING]:
            del pending[step]


class _IslandStep(NamedTuple):
    """One step of a rank or an island; ``begins`` where it must not be put to the one before."""

    record: StepRecord
    loads: tuple[float, float]
    begins: bool


def _steps(told: Measurements) -> Iterator[_IslandStep]:
    """Yield the steps that one rank has told of; sums are taken to be the same part in each."""
    stretch = np.repeat(np.arange(len(told)), told.steps)
    # All stretches but the first begin where the rank saw a change; the first begins where the
    # exchange before happened to be.
    begins = np.diff(stretch, prepend=0) > 0
    sums_s = (told.sums_s / np.maximum(told.steps, 1))[:, stretch].T.tolist()
    loads = told.loads[:, stretch].T.tolist()
    columns = zip(
        told.step_of_times().tolist(),
        told.share[stretch].tolist(),
        told.busy_s.tolist(),
        told.wait_s.tolist(),
        sums_s,
        told.modelled[stretch].tolist(),
        loads,
        begins.tolist(),
        strict=True,
    )
    for step, share, busy_s, wait_s, (data_s, outside_s, control_s), modelled, load, new in columns:
        record = StepRecord(step, share, busy_s, wait_s, data_s, outside_s, control_s, modelled)
        yield _IslandStep(record, tuple(load), begins=new)


def _usual(record: StepRecord) -> bool:
    return record.modelled and 0 < record.busy_s < inf


def _folded(told: Sequence[_IslandStep]) -> _IslandStep:
    """Return a step of an island, given that of all its members."""
    slowest = max(told, key=lambda step: step.record.busy_s)
    records = [step.record for step in told]
    sound = all(each.busy_s > 0 and each.wait_s >= 0 for each in records)  # not with a nan
    folded = slowest.record._replace(
        share=sum(each.share for each in records),
        busy_s=slowest.record.busy_s if sound else nan,
        # What others wait beyond the least they wait for members of their own island, which is no
        # wait for other islands nor communication.
        wait_s=min(each.wait_s for each in records),
        modelled=all(each.modelled for each in records),
    )
    return _IslandStep(folded, slowest.loads, any(step.begins for step in told))


def _measured(island: int, steps: Sequence[_IslandStep]) -> Measurements:
    """Return what an island has measured: of each stretch, with the loads at its end."""
    records = [step.record for step in steps]
    breaks = {index for index, step in enumerate(steps) if step.begins}
    runs = list(stretches(records, breaks))
    return in_columns(island, records, runs, [steps[run.stop - 1].loads for run in runs])


@dataclass(frozen=True, slots=True)
class Islands:
    """All ranks of a team as groups of equal ranks, in order of their lowest rank."""

    members: tuple[tuple[int, ...], ...]  # ranks of each island, ascending; each rank is in one

    @property
    def size(self) -> int:
        return sum(map(len, self.members))

    @property
    def places(self) -> tuple[int, ...]:
        """For each rank, which of the islands it is on."""
        place = {rank: k for k, island in enumerate(self.members) for rank in island}
        return tuple(place[rank] for rank in range(self.size))

    def ranks_of(self, islands: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(rank for k in islands for rank in self.members[k]))

    def of(self, rank: int) -> tuple[int, ...]:
        return next(island for island in self.members if rank in island)

    def workers(self, ranks: Sequence[Worker]) -> tuple[Worker, ...]:
        """Return the islands as workers of a fleet, given the ranks as such.

        What its weakest member can do, an island of ``n`` can do ``n`` times.
        """
        return tuple(_as_one([ranks[rank] for rank in island]) for island in self.members)

    def spread(self, shares: Shares) -> Shares:
        """Return the ranks' shares, given the islands'; first members get the odd samples.

        >>> Islands(((0, 2), (1, 3))).spread((7, 2))
        (4, 1, 3, 1)
        """
        of_ranks = [0] * self.size
        for island, share in zip(self.members, shares, strict=True):
            least, odd = divmod(share, len(island))
            for place, rank in enumerate(island):
                of_ranks[rank] = least + (place < odd)
        return tuple(of_ranks)

    def each(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return for every rank the value of its island; of no values none."""
        of_ranks = [0.0] * (self.size if values else 0)
        for island, value in zip(self.members, values, strict=bool(values)):
            for rank in island:
                of_ranks[rank] = value
        return tuple(of_ranks)

    def holdings(self, held: Iterable[PeakMemory]) -> tuple[PeakMemory, ...]:
        """Return what the ranks held as what their islands did, in samples of the island."""
        place = {rank: (k, len(i)) for k, i in enumerate(self.members) for rank in i}
        told = [(*place[one.worker], one) for one in held if one.worker in place]
        # Every report is passed on, as the highest peak of a size counts. That with the least limit
        # comes last, as the last one's limit does.
        told.sort(key=lambda one: (one[0], -_limit(one[2])))
        return tuple(replace(one, worker=k, samples=n * one.samples) for k, n, one in told)


def show_island(
    shard_group: dist.ProcessGroup | None, group: dist.ProcessGroup | None
) -> tuple[int, ...]:
    """Return the ranks of this rank's shard group, ascending, as positions in ``group``."""
    if group is None:
        return (0,)
    own = dist.get_rank(group)
    if shard_group is None:
        return (own,)
    if not isinstance(shard_group, dist.ProcessGroup):  # torch gives other ranks another object
        raise ConfigError(
            f"Stride(shard_group=...) got {type(shard_group).__name__} on rank {own}; it must be a "
            f"process group that this rank is in: {_FIX}"
        )
    return _positions(dist.get_process_group_ranks(shard_group), group)


def check_island(
    model: nn.Module, group: dist.ProcessGroup | None, islands: Islands | None
) -> None:
    """Refuse a model whose islands are not those of the `Stride`."""
    if group is None:
        return
    ranks, own = _positions(island_of(model), group), dist.get_rank(group)
    given = (own,) if islands is None else islands.of(own)
    # A model that is sharded over all ranks, or not at all, is on no island: the work of its ranks
    # is measured one by one.
    if ranks != given and 1 < len(ranks) < dist.get_world_size(group):
        raise ConfigError(
            f"watch() got a model that shards each replica over some of the ranks (rank {own}'s "
            f"over ranks {_runs_of(ranks)}), which wait for each other in every layer, but the "
            f"Stride balances rank {own} {_with_whom(given)}; {_FIX}"
        )


def _with_whom(island: Sequence[int]) -> str:
    return "by itself" if len(island) == 1 else f"as one of ranks {_runs_of(island)}"


def _positions(ranks: Sequence[int], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return global ranks as positions in a group, ascending."""
    place = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
    strange = [rank for rank in ranks if rank not in place]
    if strange:
        raise ConfigError(
            f"the shards of a replica are on rank {_runs_of(strange)} as well, which the Stride "
            f"does not train with; it has ranks {_runs_of(sorted(place))}: give "
            "Stride(process_group=...) the ranks of all shard groups"
        )
    return tuple(sorted(place[rank] for rank in ranks))


def islands_of(shown: Sequence[Sequence[int]]) -> Islands | None:
    """Return the islands that all ranks have shown to be on; ``None`` if each is on its own.

    A rank shows the ranks of its shard group, ascending.
    """
    for rank, island in enumerate(shown):
        for other in island:
            if list(shown[other]) != list(island):
                raise ConfigError(
                    f"Stride(shard_group=...) has ranks {_runs_of(island)} on rank {rank}, but "
                    f"{_runs_of(shown[other])} on rank {other}; each rank belongs to one group, "
                    f"the same for all its ranks: {_FIX}"
                )
    members = tuple(sorted({tuple(island) for island in shown}))
    sizes = sorted({len(island) for island in members})
    if len(sizes) > 1:
        raise ConfigError(
            f"Stride(shard_group=...) has {sizes[0]} ranks on some ranks and {sizes[-1]} on "
            f"others; islands must be of one size, as in a device mesh: {_FIX}"
        )
    if sizes == [1]:
        return None
    if len(members) == 1:
        logger.warning(
            "all %d ranks are one shard group, whose shares are kept equal, so nothing can be "
            "balanced; leave shard_group out to balance its ranks",
            sizes[0],
        )
    return Islands(members)


def _as_one(members: list[Worker]) -> Worker:
    n = len(members)
    quantum = lcm(*(worker.quantum for worker in members))
    most = [worker.max_share for worker in members if worker.max_share is not None]
    return Worker(
        name=_name(members),
        min_share=n * max(worker.min_share for worker in members),
        max_share=n * min(most) if most else None,
        cores=_times_least(n, [worker.cores for worker in members]),
        flops_per_s=_times_least(n, [worker.flops_per_s for worker in members]),
        quantum=n * quantum if quantum > 1 else 1,
        device=members[0].device if len({worker.device for worker in members}) == 1 else "",
        slot=members[0].slot,
    )


def _times_least(n: int, values: Sequence[float | None]) -> float | None:
    """Return ``n`` times the least value, as members are waited for; ``None`` if one lacks it."""
    known = [value for value in values if value is not None]
    return n * min(known) if len(known) == n else None


def _name(members: list[Worker]) -> str:
    """Return hosts and ranks of an island, such as ``a/0-3`` or ``a/0-3+b/4-7``."""
    parts = [worker.name.rpartition("/") for worker in members]
    hosts = [
        f"{host}/{_runs_of([int(rank) for _, _, rank in of_host])}"
        for host, of_host in groupby(parts, key=lambda part: part[0])
    ]
    shown = hosts if len(hosts) <= _MOST_HOSTS else [*hosts[: _MOST_HOSTS - 1], "...", hosts[-1]]
    return "+".join(shown)


def _runs_of(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _limit(held: PeakMemory) -> float:
    return inf if held.limit_bytes is None else held.limit_bytes
