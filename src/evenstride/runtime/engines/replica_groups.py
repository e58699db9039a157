"""Shard groups: ranks that wait for each other in every layer, balanced as one worker.

With HSDP the ranks of one shard group gather each other's parameters before every layer, so none of
them can be ahead of the others. Only the group as a whole can be balanced. The core sees shard
groups as its workers: the measurements of the ranks are merged into those of their groups, and the
share of a group is spread evenly over its ranks. The weighted gradient is exact for any split.

The busy time of a shard group is the largest of its ranks'. That is a lower bound, because
different ranks may be the slowest in different layers. In code, a shard group is an island.
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

_MOST_HOSTS = 3  # shown in full
_FIX = 'give Stride(shard_group=mesh["shard"].get_group()) on every rank'
# Steps that some rank of a group has not reported yet. Ranks are a few steps apart, and exchanges
# are at most 512 steps apart.
_MOST_PENDING = 4096


class Fold:
    """Merges the measurements of ranks into those of their shard groups, exchange by exchange."""

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self._pending: list[dict[int, dict[int, _IslandStep]]] = [{} for _ in islands.members]
        self._latest = [-1] * islands.size
        self._part = [1.0] * islands.size  # of its group's busy time, for each rank

    def take(self, measured: Sequence[Measurements]) -> Measurements:
        """Return the measurements of the shard groups, each step of a group once.

        ``measured`` has each rank's measurements since the last call, with ascending steps. Costs
        about 2 us for each step of each rank.
        """
        seen: list[Measurements] = []
        for island, (members, pending) in enumerate(
            zip(self._islands.members, self._pending, strict=True)
        ):
            for rank in members:
                for step in _steps(measured[rank]):
                    number = step.record.step
                    pending.setdefault(number, {})[rank] = step
                    self._latest[rank] = max(self._latest[rank], number)
            # A step of a group is complete once all its ranks have reported it; others wait.
            whole = sorted(step for step, by in pending.items() if len(by) == len(members))
            rows = [pending.pop(step) for step in whole]
            self._forget(pending, members)
            self._learn_parts(members, rows)
            seen.append(_measured(island, [_folded([row[r] for r in members]) for row in rows]))
        return Measurements.joined(seen)

    def expected(self, expected_s: Sequence[float]) -> tuple[float, ...]:
        """Return every rank's expected busy time, given the groups'; empty for no values."""
        # A rank is busy for its usual part of its group's time. Otherwise a rank that is faster
        # than the slowest would always be outside its band, and request one exchange after another.
        pairs = zip(self._islands.each(expected_s), self._part, strict=bool(expected_s))
        return tuple(round(one_s * part, 7) for one_s, part in pairs)

    def _learn_parts(self, members: Sequence[int], rows: list[dict[int, _IslandStep]]) -> None:
        good = [row for row in rows if all(_usual(step.record) for step in row.values())]
        whole_s = sum(max(step.record.busy_s for step in row.values()) for row in good)
        for rank in members if good else ():
            self._part[rank] = sum(row[rank].record.busy_s for row in good) / whole_s

    def _forget(self, pending: dict[int, dict[int, _IslandStep]], members: Sequence[int]) -> None:
        """Drop steps that not all ranks will report: a rank reports its steps in order."""
        complete = min(self._latest[rank] for rank in members)
        for step in [step for step in pending if step <= complete]:
            del pending[step]
        for step in sorted(pending)[:-_MOST_PENDING]:
            del pending[step]


class _IslandStep(NamedTuple):
    """One step of a rank or a group; ``begins`` if it must start a new observation."""

    record: StepRecord
    loads: tuple[float, float]
    begins: bool


def _steps(measured: Measurements) -> Iterator[_IslandStep]:
    """Yield the steps that one rank has reported; sums are split evenly over their steps."""
    stretch = np.repeat(np.arange(len(measured)), measured.steps)
    # All stretches but the first begin where the rank saw a change; the first begins wherever the
    # previous exchange was.
    begins = np.diff(stretch, prepend=0) > 0
    sums_s = (measured.sums_s / np.maximum(measured.steps, 1))[:, stretch].T.tolist()
    loads = measured.loads[:, stretch].T.tolist()
    columns = zip(
        measured.step_of_times().tolist(),
        measured.share[stretch].tolist(),
        measured.busy_s.tolist(),
        measured.wait_s.tolist(),
        sums_s,
        measured.modelled[stretch].tolist(),
        loads,
        begins.tolist(),
        strict=True,
    )
    for step, share, busy_s, wait_s, (data_s, outside_s, control_s), modelled, load, new in columns:
        record = StepRecord(step, share, busy_s, wait_s, data_s, outside_s, control_s, modelled)
        yield _IslandStep(record, tuple(load), begins=new)


def _usual(record: StepRecord) -> bool:
    return record.modelled and 0 < record.busy_s < inf


def _folded(steps: Sequence[_IslandStep]) -> _IslandStep:
    slowest = max(steps, key=lambda step: step.record.busy_s)
    records = [step.record for step in steps]
    sound = all(each.busy_s > 0 and each.wait_s >= 0 for each in records)  # false for NaN
    folded = slowest.record._replace(
        share=sum(each.share for each in records),
        busy_s=slowest.record.busy_s if sound else nan,
        # What a rank waits beyond this is for ranks of its own group: neither for other groups nor
        # for communication.
        wait_s=min(each.wait_s for each in records),
        modelled=all(each.modelled for each in records),
    )
    return _IslandStep(folded, slowest.loads, any(step.begins for step in steps))


def _measured(island: int, steps: Sequence[_IslandStep]) -> Measurements:
    records = [step.record for step in steps]
    breaks = {index for index, step in enumerate(steps) if step.begins}
    runs = list(stretches(records, breaks))
    return in_columns(island, records, runs, [steps[run.stop - 1].loads for run in runs])


@dataclass(frozen=True, slots=True)
class Islands:
    """All ranks of a team in shard groups of equal size, in order of their lowest rank."""

    members: tuple[tuple[int, ...], ...]  # ranks of each group, ascending; each rank is in one

    @property
    def size(self) -> int:
        return sum(map(len, self.members))

    @property
    def places(self) -> tuple[int, ...]:
        """For each rank, the number of its group."""
        place = {rank: k for k, island in enumerate(self.members) for rank in island}
        return tuple(place[rank] for rank in range(self.size))

    def ranks_of(self, islands: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(rank for k in islands for rank in self.members[k]))

    def of(self, rank: int) -> tuple[int, ...]:
        return next(island for island in self.members if rank in island)

    def workers(self, ranks: Sequence[Worker]) -> tuple[Worker, ...]:
        """Return the groups as workers of a fleet, given the ranks as such.

        A group of ``n`` ranks can do ``n`` times what its weakest rank can do.
        """
        return tuple(_as_one([ranks[rank] for rank in island]) for island in self.members)

    def spread(self, shares: Shares) -> Shares:
        """Return the ranks' shares, given the groups'; the first ranks get the odd samples.

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
        """Return for every rank the value of its group; empty for no values."""
        of_ranks = [0.0] * (self.size if values else 0)
        for island, value in zip(self.members, values, strict=bool(values)):
            for rank in island:
                of_ranks[rank] = value
        return tuple(of_ranks)

    def holdings(self, held: Iterable[PeakMemory]) -> tuple[PeakMemory, ...]:
        """Translate the peak memory of ranks into that of their groups, in samples of the group."""
        place = {rank: (k, len(i)) for k, i in enumerate(self.members) for rank in i}
        reports = [(*place[one.worker], one) for one in held if one.worker in place]
        # Every report is passed on, because the highest peak of a size counts. The report with the
        # smallest limit comes last, because the last limit counts.
        reports.sort(key=lambda one: (one[0], -_limit(one[2])))
        return tuple(replace(one, worker=k, samples=n * one.samples) for k, n, one in reports)


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
    """Refuse a model whose shard groups are not those of the `Stride`."""
    if group is None:
        return
    ranks, own = _positions(island_of(model), group), dist.get_rank(group)
    given = (own,) if islands is None else islands.of(own)
    # A model that is sharded over all ranks, or not at all, has no shard groups to balance: each of
    # its ranks is measured by itself.
    if ranks != given and 1 < len(ranks) < dist.get_world_size(group):
        raise ConfigError(
            f"watch() got a model that shards each copy of its parameters over some of the ranks "
            f"(rank {own}'s over ranks {_runs_of(ranks)}). These wait for each other in every "
            f"layer, but the Stride balances rank {own} {_with_others(given)}; {_FIX}"
        )


def _with_others(island: Sequence[int]) -> str:
    return "by itself" if len(island) == 1 else f"as one of ranks {_runs_of(island)}"


def _positions(ranks: Sequence[int], group: dist.ProcessGroup) -> tuple[int, ...]:
    place = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
    strange = [rank for rank in ranks if rank not in place]
    if strange:
        raise ConfigError(
            f"this rank's shard group includes rank {_runs_of(strange)}, which is not in the "
            f"process group of the Stride (ranks {_runs_of(sorted(place))}); give "
            "Stride(process_group=...) the ranks of all shard groups"
        )
    return tuple(sorted(place[rank] for rank in ranks))


def islands_of(shown: Sequence[Sequence[int]]) -> Islands | None:
    """Return the shard groups, given that of every rank; ``None`` if each rank is a worker.

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
            f"others; shard groups must have equal sizes, as in a device mesh: {_FIX}"
        )
    if sizes == [1]:
        return None
    if len(members) == 1:
        logger.warning(
            "all %d ranks are one shard group, whose ranks keep equal shares, so nothing can be "
            "balanced; leave shard_group out to balance the ranks",
            sizes[0],
        )
    return Islands(members)


def _as_one(members: list[Worker]) -> Worker:
    n = len(members)
    quantum = lcm(*(worker.multiple for worker in members))
    found = all(worker.quantum is None for worker in members)
    most = [worker.max_share for worker in members if worker.max_share is not None]
    return Worker(
        name=_name(members),
        min_share=n * max(worker.min_share for worker in members),
        max_share=n * min(most) if most else None,
        cores=_times_least(n, [worker.cores for worker in members]),
        flops_per_s=_times_least(n, [worker.flops_per_s for worker in members]),
        quantum=None if found else n * quantum if quantum > 1 else 1,
        device=members[0].device if len({worker.device for worker in members}) == 1 else "",
        slot=members[0].slot,
    )


def _times_least(n: int, values: Sequence[float | None]) -> float | None:
    """Return ``n`` times the smallest value, as for the slowest rank; ``None`` if one lacks it."""
    known = [value for value in values if value is not None]
    return n * min(known) if len(known) == n else None


def _name(members: list[Worker]) -> str:
    """Return hosts and ranks of a group, such as ``a/0-3`` or ``a/0-3+b/4-7``."""
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
