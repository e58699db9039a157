"""Where the time of a run went: who made the others wait, when and why, who slowed down, and sums.

In each step the slowest worker makes every other one wait for the difference of their own work.
That difference is counted, not what ranks report as waiting: this has the communication in it,
which is nobody's fault. A worker that slowed down gets fewer samples, and then nobody waits for it.
What it cost is in the shares of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from evenstride.core.allocation.speedup import JudgedTime, judged_time
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.run_generation import (
    RecordedGeneration,
    Waits,
    durations_s,
    split_rows,
    split_share,
    waits_of,
)
from evenstride.report.analysis.speed_phases import SpeedPhase, phases_of
from evenstride.report.wording import duration

_MENTIONED = 0.02  # of the time; who caused less is not named
_UNTOLD = 0.05  # of what a worker caused, at most, without being told of apart
_NEXT_TO_NOTHING = 0.005
_SLOWER = 0.9  # of its own best speed; above that it did not slow down
_DATA = 0.5  # of its own work
_MOST_STRETCHES = 3
_EDGE = 0.01  # of what a worker caused in a phase, that may lie at either end of it
_SHORTER = 0.85
_AS_SLOW = 0.5
_CHANCE = 0.02
_ALWAYS = 0.9
_BLOCK = 100  # steps, over which times are summed so that scatter does not count
_MOST_BLOCKS = 50
_LASTING = 0.05  # of all steps; a slow-down that is shorter is not told of
_MOST_PHASES = 3  # that are told of one by one


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in which a worker kept the others waiting, in one phase of its speed."""

    first: int  # number of the first step
    last: int  # number of the last
    speed: float  # of the worker, as a part of its own best
    caused_s: float  # seconds that the others waited for it, of all of them together
    data_part: float  # of its own work, waiting for data
    # How much longer it works as a rule than the slowest of the others, as a part of that, where
    # they waited for it; below 0.02 only its scatter makes them wait
    longer: float = 0.0
    often: float = 1.0  # in what part of the stretch it is slower than all others as a rule


@dataclass(frozen=True, slots=True)
class Blame:
    """What one worker cost the others."""

    rank: int
    worker: str
    caused_s: float  # seconds that the others waited for it, of all of them together
    each_s: float  # the same for each of the others, on average: what it cost by the clock
    part: float  # `each_s` as a part of the time of all steps
    slowest_steps: int  # how many it was the slowest in
    stretches: tuple[Stretch, ...]  # phases of its speed, those in which it caused most first
    reason: str  # one sentence


def speeds_of(generation: RecordedGeneration, rank: int) -> FloatArray:
    """Return a worker's speed in each step, in any unit: what it should take over what it took.

    Steps that say nothing (the first of a pass, those without samples) are not a number.
    """
    table = generation.table
    busy_s, share = table.busy_s[:, rank], table.share[:, rank]
    says = table.modelled[:, rank] & (share > 0) & (busy_s > 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(says, _usual_s(generation, rank) / busy_s, np.nan)


def _usual_s(generation: RecordedGeneration, rank: int) -> FloatArray:
    """Return what its curve says that its shares take: its shape is what counts."""
    share = generation.table.share[:, rank].astype(np.float64)
    if generation.curves is None or rank not in generation.serving:
        return share
    place = generation.serving.index(rank)
    fixed_s = float(generation.curves.fixed_s[place])
    return np.asarray(fixed_s + float(generation.curves.per_sample_s[place]) * share)


class Study:
    """What one look at a generation works out, each part once, and only if it is asked for.

    The generation must not grow meanwhile.
    """

    def __init__(self, generation: RecordedGeneration) -> None:
        self.generation = generation
        self._phases: dict[int, tuple[SpeedPhase, ...]] = {}

    @cached_property
    def waits(self) -> Waits:
        return waits_of(self.generation)

    @cached_property
    def durations_s(self) -> FloatArray:
        return durations_s(self.generation)

    @cached_property
    def split_rows(self) -> IntArray:
        """For each step, the row that shows the split in force at it."""
        return split_rows(self.generation)

    def share(self, rank: int) -> FloatArray:
        """Return a worker's samples in the split of each step; not a number if nothing was told."""
        return split_share(self.generation, rank, self.split_rows)

    def phases(self, rank: int) -> tuple[SpeedPhase, ...]:
        if rank not in self._phases:
            self._phases[rank] = phases_of(speeds_of(self.generation, rank))
        return self._phases[rank]

    def speed_now(self, rank: int) -> tuple[float | None, int | None]:
        """Return a worker's speed as a part of its best, and the step it has been so since.

        ``None`` stands for a speed that is not known, and for a step where it is so all the time.
        """
        phases = self.phases(rank)
        if not phases:
            return None, None
        since = self.generation.first + phases[-1].first if len(phases) > 1 else None
        return phases[-1].speed, since

    @cached_property
    def blames(self) -> tuple[Blame, ...]:
        """What each worker cost the others, who cost most first."""
        caused_s = self.waits.caused_s.sum(axis=0)
        order = np.argsort(-caused_s, kind="stable").tolist()
        return tuple(_blame(self, rank, float(caused_s[rank])) for rank in order)


def blames_of(generation: RecordedGeneration) -> tuple[Blame, ...]:
    """Return what each worker cost the others, who cost most first.

    Cost:
        some 30 ms for each worker that caused anything worth mentioning.
    """
    return Study(generation).blames


def _blame(study: Study, rank: int, caused_s: float) -> Blame:
    generation, took_s = study.generation, float(study.durations_s.sum())
    each_s = caused_s / max(len(generation.workers) - 1, 1)
    part = each_s / took_s if took_s else 0.0
    stretches = _stretches(study, rank) if part >= _MENTIONED else ()
    return Blame(
        rank=rank,
        worker=generation.workers[rank],
        caused_s=caused_s,
        each_s=each_s,
        part=part,
        slowest_steps=int(np.count_nonzero(study.waits.caused_s[:, rank])),
        stretches=stretches,
        reason=_reason(generation, rank, each_s, part, stretches),
    )


def _stretches(study: Study, rank: int) -> tuple[Stretch, ...]:
    last = study.generation.steps - 1
    # Of a run in which every step is the first of a pass, no speed is known.
    phases = study.phases(rank) or (SpeedPhase(0, last, 1.0),)
    # Steps before, between and after those that are modelled belong to the phase before.
    begins = [0, *(phase.first for phase in phases[1:])]
    ends = [*(begin - 1 for begin in begins[1:]), last]
    found = [
        _stretch(study, rank, SpeedPhase(begin, end, phase.speed))
        for begin, end, phase in zip(begins, ends, phases, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: -one.caused_s))


def _stretch(study: Study, rank: int, phase: SpeedPhase) -> Stretch:
    begin, table = study.generation.first, study.generation.table
    of_phase_s = study.waits.caused_s[phase.first : phase.last + 1]
    first, last = (phase.first + row for row in _waited(of_phase_s, rank))
    rows = slice(first, last + 1)
    busy_s = float(np.nansum(table.busy_s[rows, rank]))
    data_s = float(np.nansum(table.data_s[rows, rank]))
    longer, often = _slower(table.busy_s[rows], study.waits.caused_s[rows, rank], rank)
    return Stretch(
        first=begin + first,
        last=begin + last,
        speed=phase.speed,
        caused_s=float(of_phase_s[:, rank].sum()),
        data_part=data_s / busy_s if busy_s else 0.0,
        longer=longer,
        often=often,
    )


def _waited(caused_s: FloatArray, rank: int) -> tuple[int, int]:
    """Return the first and last row of a phase in which the others waited for a worker.

    All of it, unless nearly all of its waiting is in clearly fewer and in the rest they waited for
    somebody who was slower still.
    """
    own_s = caused_s[:, rank]
    whole, sums_s = (0, len(own_s) - 1), np.cumsum(own_s)
    if not len(own_s) or not sums_s[-1]:
        return whole
    first = int(np.searchsorted(sums_s, _EDGE * sums_s[-1], side="right"))
    last = int(np.searchsorted(sums_s, (1.0 - _EDGE) * sums_s[-1]))
    if last - first + 1 >= _SHORTER * len(own_s):
        return whole
    rest_s = np.delete(np.delete(caused_s, rank, axis=1), slice(first, last + 1), axis=0)
    if float(np.median(rest_s.sum(axis=1))) < _AS_SLOW * own_s[first : last + 1].mean():
        return whole
    edge = round(_EDGE * (last - first + 1))  # what was cut off, as far as it is as dense
    return max(first - edge, 0), min(last + edge, whole[1])


def _slower(busy_s: FloatArray, caused_s: FloatArray, rank: int) -> tuple[float, float]:
    """Return how much slower than all others a worker is as a rule, and in what part of steps.

    Sums over blocks of a hundred steps, so that scatter does not count; blocks weigh as much as
    others waited for it in them.
    """
    whole = ~np.isnan(busy_s).any(axis=1)
    if not whole.any() or busy_s.shape[1] < 2:
        return 0.0, 0.0
    count = int(np.clip(np.count_nonzero(whole) // _BLOCK, 1, _MOST_BLOCKS))
    blocks = np.array_split(np.flatnonzero(whole), count)
    sums_s = np.array([busy_s[block].sum(axis=0) for block in blocks])
    weights = np.array([caused_s[block].sum() for block in blocks])
    ratios = sums_s[:, rank] / np.delete(sums_s, rank, axis=1).max(axis=1) - 1.0
    longer = float((ratios * weights).sum() / weights.sum()) if weights.any() else 0.0
    return longer, float((ratios > 0.0).mean())


def _reason(
    generation: RecordedGeneration,
    rank: int,
    each_s: float,
    part: float,
    stretches: tuple[Stretch, ...],
) -> str:
    name = f"worker {rank} ({generation.workers[rank]})"
    if not generation.lockstep:
        return f"{name}: nobody waits for another in this mode"
    if part < _MENTIONED or not stretches:
        return f"{name} made the others wait {duration(each_s)}, {part:.1%} of the time"
    told = f"{name} made each of the others wait {duration(each_s)}, {part:.0%} of the time"
    total_s = sum(one.caused_s for one in stretches)
    main = _main(stretches, total_s)
    when = [_when(generation, one) for one in main]
    why = [_why(generation, one) for one in main]
    rest = 1.0 - sum(one.caused_s for one in main) / total_s
    if len(main) == 1 and rest <= _UNTOLD:
        return f"{told}, {when[0]}: {why[0]}"
    parts = [duration(each_s * one.caused_s / total_s) for one in main]
    each = [f"{p} {w} ({y})" for p, w, y in zip(parts, when, why, strict=True)]
    if rest > _NEXT_TO_NOTHING:
        each.append(f"{duration(each_s * rest)} at other times")
    return f"{told}: {', '.join(each)}"


def _main(stretches: tuple[Stretch, ...], total_s: float) -> list[Stretch]:
    """Return the few stretches that hold nearly all of what a worker caused, in order."""
    main, held_s = [], 0.0
    for one in stretches[:_MOST_STRETCHES]:
        main.append(one)
        held_s += one.caused_s
        if held_s >= (1.0 - _UNTOLD) * total_s:
            break
    return sorted(main, key=lambda one: one.first)


def _when(generation: RecordedGeneration, one: Stretch) -> str:
    last_step = generation.first + generation.steps - 1
    from_start, to_end = one.first <= generation.first, one.last >= last_step
    if from_start and to_end:
        when = "all the time" if one.often >= _ALWAYS else "most of the time"
        return when if one.often >= 0.5 else "at times"
    if to_end:
        return f"since step {one.first:,}"
    if from_start:
        return f"up to step {one.last:,}"
    if one.first == one.last:
        return f"in step {one.first:,}"
    return f"in steps {one.first:,} to {one.last:,}"


def _why(generation: RecordedGeneration, one: Stretch) -> str:
    if one.data_part >= _DATA:
        return f"{one.data_part:.0%} of its own time it waited for data"
    share = f"its share took it {one.longer:.0%} longer than any other took for its own"
    if one.speed < _SLOWER:
        fell = "was" if one.first <= generation.first else "fell to"
        speed = f"its speed {fell} {one.speed:.2f} of its best"
        # A slow-down that explains the lesser part of it is not the reason.
        return speed if 1.0 / one.speed - 1.0 >= 0.5 * one.longer else f"{share}, and {speed}"
    if one.longer < _CHANCE:
        return "by chance, as its times scatter; it is no slower as a rule"
    return share


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A worker that was slower than at its best, where its waits do not tell that already."""

    rank: int
    lost: float  # steps at its best speed that it lost
    told: str  # how slow it was when, such as ``ran at 0.5 of its best speed since step 200``


def slowed_of(study: Study, ranks: Iterable[int]) -> tuple[Slowdown, ...]:
    """Return who of some workers slowed down, who lost most first.

    Cost:
        that of their phases, some 20 ms for each worker.
    """
    found = []
    for rank in ranks:
        phases = [
            one
            for one in study.phases(rank)
            if one.speed < _SLOWER and _steps(one) >= _LASTING * study.generation.steps
        ]
        told = _slowdown_told(study, rank, phases)
        if told:
            lost = sum((1.0 - one.speed) * _steps(one) for one in phases)
            found.append(Slowdown(rank, lost, f"ran {told}"))
    return tuple(sorted(found, key=lambda one: -one.lost))


def _steps(phase: SpeedPhase) -> int:
    return phase.last - phase.first + 1


def _slowdown_told(study: Study, rank: int, phases: Sequence[SpeedPhase]) -> str:
    """Return at which speed a worker ran when; nothing where its waits tell that already."""
    if not phases:
        return ""
    blamed = any(one.rank == rank and one.stretches for one in study.blames)
    if len(phases) > _MOST_PHASES:
        if blamed:
            return ""
        slowest = min(one.speed for one in phases)
        return (
            f"below its best speed in {len(phases)} phases, at {slowest:.2f} of it in the slowest"
        )
    changes = [_share_change(study, rank, one) for one in phases]
    if blamed and not any(changes):
        return ""
    return "; ".join(
        f"at {one.speed:.2f} of its best speed {_steps_told(study, one)}{change}"
        for one, change in zip(phases, changes, strict=True)
    )


def _steps_told(study: Study, phase: SpeedPhase) -> str:
    first = study.generation.first
    if phase.last >= study.generation.steps - 1:
        return f"since step {first + phase.first:,}"
    return f"in steps {first + phase.first:,} to {first + phase.last:,}"


def _share_change(study: Study, rank: int, phase: SpeedPhase) -> str:
    """Return how its share answered to a phase of its speed."""
    share = study.share(rank)
    before, after = share[max(phase.first - 1, 0)], share[phase.last]
    if np.isnan(before) or np.isnan(after) or before == after:
        return ""
    return f", its share going from {before:,.0f} to {after:,.0f} samples"


@dataclass(frozen=True, slots=True)
class Totals(JudgedTime):
    """Sums over all steps of one or several generations, in seconds."""

    steps: int
    samples: int
    took_s: float
    busy_s: float
    waited_s: float
    communication_s: float
    apart_s: float  # evaluation, saving, waiting for decisions, by the clock

    def to_dict(self) -> dict[str, Any]:
        """Return the sums and the figures that they give, as JSON types."""
        names = ("efficiency_model", "speedup_model", "bound_model", "saved_s", "waiting_part")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    @property
    def waiting_part(self) -> float:
        """Of all workers' time in steps, the part spent waiting for slower ones."""
        whole_s = self.busy_s + self.waited_s
        return self.waited_s / whole_s if whole_s else 0.0


def totals_of(generations: Sequence[RecordedGeneration]) -> Totals:
    """Return what some generations came to together."""
    parts = [_totals(one) for one in generations] or [Totals(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    names = Totals.__dataclass_fields__
    return Totals(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _totals(generation: RecordedGeneration) -> Totals:
    table, waits, lasting_s = generation.table, waits_of(generation), durations_s(generation)
    judged = judged_time(lasting_s, generation.slowest_s, table.other_s)
    return Totals(
        steps=generation.steps,
        samples=int(np.maximum(table.share, 0).sum()),
        took_s=float(lasting_s.sum()),
        judged_steps=judged.judged_steps,
        judged_s=judged.judged_s,
        equal_s=judged.equal_s,
        best_s=judged.best_s,
        busy_s=float(np.nansum(table.busy_s)),
        waited_s=float(waits.waited_s.sum()),
        communication_s=float(waits.communication_s.sum()),
        apart_s=float(np.nan_to_num(table.apart_s).max(axis=1, initial=0.0).sum()),
    )
