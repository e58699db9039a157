"""Attribute the time of a run: which worker made the others wait, when and why, and sums.

In each step, every worker waits for the slowest one by the difference of their busy times. Only
this difference is attributed. The waiting times that ranks report also contain communication,
which no worker causes. A worker that slows down gets fewer samples, so that no worker waits for
it; its cost is in the shares of the others.
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

_MENTIONED = 0.02  # fraction of the run's time; a worker that caused less is not named
_UNREPORTED = 0.05  # largest fraction of a worker's caused time that is not reported separately
_NEGLIGIBLE = 0.005
_SLOWER = 0.9  # of its own best speed; a faster worker did not slow down
_DATA = 0.5  # fraction of the busy time
_MOST_STRETCHES = 3
_EDGE = 0.01  # fraction of the caused time that may lie at either end of a phase
_SHORTER = 0.85
_AS_SLOW = 0.5
_CHANCE = 0.02
_ALWAYS = 0.9
_BLOCK = 100  # steps; sums over a block average out the random variation
_MOST_BLOCKS = 50
_LASTING = 0.05  # fraction of all steps; a shorter slowdown is not reported
_MOST_PHASES = 3  # that are reported one by one


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in which a worker made the others wait, within one phase of its speed."""

    first: int  # number of the first step.
    last: int  # number of the last.
    speed: float  # of the worker, as a fraction of its own best.
    caused_s: float  # seconds that the others waited for it, summed over them.
    data_part: float  # fraction of its busy time in which it waited for data.
    # Excess of its busy time over that of the slowest other worker, as a fraction of the latter,
    # where they waited for it; below 0.02 only its random variation makes them wait
    longer: float = 0.0
    often: float = 1.0  # fraction of the stretch in which it is usually the slowest.


@dataclass(frozen=True, slots=True)
class Blame:
    """The waiting time that one worker caused."""

    rank: int
    worker: str
    caused_s: float  # seconds that the others waited for it, summed over them.
    each_s: float  # the same per other worker: the cost in wall-clock time.
    part: float  # `each_s` as a fraction of the time of all steps.
    slowest_steps: int  # number of steps in which it was the slowest.
    stretches: tuple[Stretch, ...]  # phases of its speed, by caused time, largest first.
    reason: str  # one sentence.


def speeds_of(generation: RecordedGeneration, rank: int) -> FloatArray:
    """Return a worker's relative speed in each step: expected time divided by measured time.

    Steps that carry no information (the first of a pass, those without samples) are NaN.
    """
    table = generation.table
    busy_s, share = table.busy_s[:, rank], table.share[:, rank]
    usable = table.modelled[:, rank] & (share > 0) & (busy_s > 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(usable, _expected_s(generation, rank) / busy_s, np.nan)


def _expected_s(generation: RecordedGeneration, rank: int) -> FloatArray:
    """Return the time of each share by the worker's fitted curve. Only its shape matters."""
    share = generation.table.share[:, rank].astype(np.float64)
    if generation.curves is None or rank not in generation.serving:
        return share
    place = generation.serving.index(rank)
    fixed_s = float(generation.curves.fixed_s[place])
    return np.asarray(fixed_s + float(generation.curves.per_sample_s[place]) * share)


class Study:
    """Computes properties of a generation lazily, each once.

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
        """For each step, the row that shows its split."""
        return split_rows(self.generation)

    def share(self, rank: int) -> FloatArray:
        """Return a worker's samples in the split of each step; NaN where it is unknown."""
        return split_share(self.generation, rank, self.split_rows)

    def phases(self, rank: int) -> tuple[SpeedPhase, ...]:
        if rank not in self._phases:
            self._phases[rank] = phases_of(speeds_of(self.generation, rank))
        return self._phases[rank]

    def speed_now(self, rank: int) -> tuple[float | None, int | None]:
        """Return a worker's speed as a fraction of its best, and the step at which it changed.

        ``None`` stands for an unknown speed, and for a speed that never changed.
        """
        phases = self.phases(rank)
        if not phases:
            return None, None
        since = self.generation.first + phases[-1].first if len(phases) > 1 else None
        return phases[-1].speed, since

    @cached_property
    def blames(self) -> tuple[Blame, ...]:
        """The waiting time that each worker caused, the largest first."""
        caused_s = self.waits.caused_s.sum(axis=0)
        order = np.argsort(-caused_s, kind="stable").tolist()
        return tuple(_blame(self, rank, float(caused_s[rank])) for rank in order)


def blames_of(generation: RecordedGeneration) -> tuple[Blame, ...]:
    """Return the waiting time that each worker caused, the largest first.

    Cost:
        About 30 ms for each worker that caused a notable amount.
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
    # No speed is known if every step is the first of a pass.
    phases = study.phases(rank) or (SpeedPhase(0, last, 1.0),)
    # Steps that are not modelled belong to the phase before them.
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

    This is the whole phase, unless nearly all of the waiting is in clearly fewer rows and the
    others waited for an even slower worker in the rest.
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
    edge = round(_EDGE * (last - first + 1))  # restores the rows cut off at the ends
    return max(first - edge, 0), min(last + edge, whole[1])


def _slower(busy_s: FloatArray, caused_s: FloatArray, rank: int) -> tuple[float, float]:
    """Return how much slower than all others a worker usually is, and in what fraction of steps.

    Sums over blocks of 100 steps average out random variation. A block's weight is the time that
    others waited for the worker in it.
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
        return f"{name}: workers do not wait for each other in this mode"
    if part < _MENTIONED or not stretches:
        return f"{name} made the others wait {duration(each_s)}, {part:.1%} of the time"
    cost = f"{name} made each other worker wait {duration(each_s)}, {part:.0%} of the time"
    total_s = sum(one.caused_s for one in stretches)
    main = _main(stretches, total_s)
    when = [_when(generation, one) for one in main]
    why = [_why(generation, one) for one in main]
    rest = 1.0 - sum(one.caused_s for one in main) / total_s
    if len(main) == 1 and rest <= _UNREPORTED:
        return f"{cost}, {when[0]}: {why[0]}"
    parts = [duration(each_s * one.caused_s / total_s) for one in main]
    each = [f"{p} {w} ({y})" for p, w, y in zip(parts, when, why, strict=True)]
    if rest > _NEGLIGIBLE:
        each.append(f"{duration(each_s * rest)} at other times")
    return f"{cost}: {', '.join(each)}"


def _main(stretches: tuple[Stretch, ...], total_s: float) -> list[Stretch]:
    """Return the few stretches with nearly all of the caused time, in order of steps."""
    main, held_s = [], 0.0
    for one in stretches[:_MOST_STRETCHES]:
        main.append(one)
        held_s += one.caused_s
        if held_s >= (1.0 - _UNREPORTED) * total_s:
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
        return f"it waited for data in {one.data_part:.0%} of its busy time"
    share = f"its share took {one.longer:.0%} longer than any other worker's share"
    if one.speed < _SLOWER:
        fell = "was" if one.first <= generation.first else "fell to"
        speed = f"its speed {fell} {one.speed:.2f} of its best"
        # A slowdown that explains less than half of the excess is not the reason.
        return speed if 1.0 / one.speed - 1.0 >= 0.5 * one.longer else f"{share}, and {speed}"
    if one.longer < _CHANCE:
        return "by chance; its step times vary, but it is not slower on average"
    return share


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A worker that ran below its best speed and is not named for its waits already."""

    rank: int
    lost: float  # time lost, in steps at its best speed
    text: str  # speed and steps, such as ``ran at 0.5 of its best speed since step 200``
    worst: str  # the same of the phase in which it lost most


def slowed_of(study: Study, ranks: Iterable[int]) -> tuple[Slowdown, ...]:
    """Return the workers that slowed down, by lost time, largest first.

    Cost:
        About 20 ms for each worker.
    """
    found = []
    for rank in ranks:
        phases = [
            one
            for one in study.phases(rank)
            if one.speed < _SLOWER and _steps(one) >= _LASTING * study.generation.steps
        ]
        if text := _slowdown_text(study, rank, phases):
            worst = max(phases, key=_lost)
            found.append(
                Slowdown(rank, sum(map(_lost, phases)), f"ran {text}", _phase_text(study, worst))
            )
    return tuple(sorted(found, key=lambda one: -one.lost))


def _lost(phase: SpeedPhase) -> float:
    return (1.0 - phase.speed) * _steps(phase)


def _steps(phase: SpeedPhase) -> int:
    return phase.last - phase.first + 1


def _slowdown_text(study: Study, rank: int, phases: Sequence[SpeedPhase]) -> str:
    """Return a worker's speeds and their steps; empty if its blame reports them already."""
    if not phases:
        return ""
    blamed = any(one.rank == rank and one.stretches for one in study.blames)
    if len(phases) > _MOST_PHASES:
        if blamed:
            return ""
        slowest = min(one.speed for one in phases)
        return (
            f"below its best speed in {len(phases)} phases, at {slowest:.2f} of it at the slowest"
        )
    changes = [_share_change(study, rank, one) for one in phases]
    if blamed and not any(changes):
        return ""
    return "; ".join(
        f"{_phase_text(study, one)}{change}" for one, change in zip(phases, changes, strict=True)
    )


def _phase_text(study: Study, phase: SpeedPhase) -> str:
    first = study.generation.first
    steps = f"in steps {first + phase.first:,} to {first + phase.last:,}"
    if phase.last >= study.generation.steps - 1:
        steps = f"since step {first + phase.first:,}"
    return f"at {phase.speed:.2f} of its best speed {steps}"


def _share_change(study: Study, rank: int, phase: SpeedPhase) -> str:
    """Return how its share changed in a phase; empty if it did not."""
    share = study.share(rank)
    before, after = share[max(phase.first - 1, 0)], share[phase.last]
    if np.isnan(before) or np.isnan(after) or before == after:
        return ""
    return f", and its share went from {before:,.0f} to {after:,.0f} samples"


@dataclass(frozen=True, slots=True)
class Totals(JudgedTime):
    """Sums over the steps of one or several generations, in seconds."""

    steps: int
    samples: int
    took_s: float
    busy_s: float
    waited_s: float
    communication_s: float
    apart_s: float  # wall-clock time of evaluation, saving and waiting for decisions

    def to_dict(self) -> dict[str, Any]:
        """Return the sums and the figures derived from them, as JSON types."""
        names = ("efficiency_model", "speedup_model", "bound_model", "saved_s", "waiting_part")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    @property
    def waiting_part(self) -> float:
        """Fraction of all workers' time in steps spent waiting for slower workers."""
        whole_s = self.busy_s + self.waited_s
        return self.waited_s / whole_s if whole_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of step time."""
        return self.samples / self.took_s if self.took_s else 0.0


def totals_of(generations: Sequence[RecordedGeneration]) -> Totals:
    """Return the sums over some generations."""
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
