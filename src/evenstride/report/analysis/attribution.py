"""Who made the others wait, since when, for how long, and why.

In each step the slowest worker makes every other one wait for the difference of their own work.
That difference is counted, not what ranks report as waiting: this has the communication in it,
which is nobody's fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.analysis.speed_phases import SpeedPhase, phases_of
from evenstride.report.analysis.splits import split_rows, split_share
from evenstride.report.analysis.step_clock import durations_s
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
_BLOCK, _MOST_BLOCKS = 100, 50


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in which a worker kept the others waiting, in one phase of its speed.

    Args:
        first: number of the first step.
        last: number of the last.
        speed: of the worker, as a part of its own best.
        caused_s: seconds that the others waited for it, of all of them together.
        data_part: of its own work, waiting for data.
        longer: how much longer it works as a rule than the slowest of the others, as a part of
            that, where they waited for it; below 0.02 only its scatter makes them wait.
        often: in what part of the stretch it is slower than all others as a rule.
    """

    first: int
    last: int
    speed: float
    caused_s: float
    data_part: float
    longer: float = 0.0
    often: float = 1.0


@dataclass(frozen=True, slots=True)
class Blame:
    """What one worker cost the others.

    Args:
        rank: of the worker.
        worker: its name.
        caused_s: seconds that the others waited for it, of all of them together.
        each_s: the same for each of the others, on average: what it cost by the clock.
        part: that as a part of the time of all steps.
        slowest_steps: how many it was the slowest in.
        stretches: phases of its speed, those in which it caused most first.
        reason: one sentence.
    """

    rank: int
    worker: str
    caused_s: float
    each_s: float
    part: float
    slowest_steps: int
    stretches: tuple[Stretch, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Who waited for whom in a generation.

    Args:
        caused_s: by each worker in each step, ``(steps, workers)``.
        waited_s: by each worker for the slowest, ``(steps, workers)``.
        communication_s: the least wait of each step, ``(steps,)``.
    """

    caused_s: FloatArray
    waited_s: FloatArray
    communication_s: FloatArray


def waits_of(generation: RecordedGeneration) -> Waits:
    """Return who waited for whom, step by step; 0 in steps that not all have told of."""
    table, whole = generation.table, generation.table.whole
    busy_s = table.busy_s[whole]
    shape = (generation.steps, len(generation.workers))
    caused_s, waited_s = np.zeros(shape), np.zeros(shape)
    communication_s = np.zeros(generation.steps)
    if len(busy_s) and generation.lockstep:
        slowest = busy_s.argmax(axis=1)
        gaps_s = busy_s.max(axis=1)[:, np.newaxis] - busy_s
        waited_s[whole] = gaps_s
        caused_s[np.flatnonzero(whole), slowest] = gaps_s.sum(axis=1)
        communication_s[whole] = table.wait_s[whole].min(axis=1)
    return Waits(caused_s, waited_s, communication_s)


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

    Args:
        generation: as far as it was read; it must not grow meanwhile.
    """

    def __init__(self, generation: RecordedGeneration) -> None:
        self.generation = generation
        self._phases: dict[int, tuple[SpeedPhase, ...]] = {}

    @cached_property
    def waits(self) -> Waits:
        """Who waited for whom, step by step."""
        return waits_of(self.generation)

    @cached_property
    def durations_s(self) -> FloatArray:
        """How long each step took, ``(steps,)``."""
        return durations_s(self.generation)

    @cached_property
    def split_rows(self) -> IntArray:
        """For each step, the row that shows the split in force at it."""
        return split_rows(self.generation)

    def share(self, rank: int) -> FloatArray:
        """Return a worker's samples in the split of each step; not a number if nothing was told."""
        return split_share(self.generation, rank, self.split_rows)

    def phases(self, rank: int) -> tuple[SpeedPhase, ...]:
        """Return the phases of a worker's speed."""
        if rank not in self._phases:
            self._phases[rank] = phases_of(speeds_of(self.generation, rank))
        return self._phases[rank]

    @cached_property
    def blames(self) -> tuple[Blame, ...]:
        """What each worker cost the others, who cost most first."""
        return blames_of(self.generation, self)


def blames_of(generation: RecordedGeneration, study: Study | None = None) -> tuple[Blame, ...]:
    """Return what each worker cost the others, who cost most first.

    Cost:
        some 30 ms for each worker that caused anything worth mentioning.
    """
    study = study or Study(generation)
    waits, took_s = study.waits, float(study.durations_s.sum())
    others = max(len(generation.workers) - 1, 1)
    caused_s = waits.caused_s.sum(axis=0)
    found = []
    for rank in np.argsort(-caused_s, kind="stable").tolist():
        each_s = float(caused_s[rank]) / others
        part = each_s / took_s if took_s else 0.0
        stretches = _stretches(study, rank) if part >= _MENTIONED else ()
        found.append(
            Blame(
                rank=rank,
                worker=generation.workers[rank],
                caused_s=float(caused_s[rank]),
                each_s=each_s,
                part=part,
                slowest_steps=int(np.count_nonzero(waits.caused_s[:, rank])),
                stretches=stretches,
                reason=_reason(generation, rank, each_s, part, stretches),
            )
        )
    return tuple(found)


def _stretches(study: Study, rank: int) -> tuple[Stretch, ...]:
    generation, waits = study.generation, study.waits
    # Of a run in which every step is the first of a pass, no speed is known.
    phases = study.phases(rank) or (SpeedPhase(0, generation.steps - 1, 1.0),)
    # Steps before, between and after those that are modelled belong to the phase before.
    begins = [0, *(phase.first for phase in phases[1:])]
    ends = [*(begin - 1 for begin in begins[1:]), generation.steps - 1]
    found = [
        _stretch(generation, rank, waits, SpeedPhase(begin, end, phase.speed))
        for begin, end, phase in zip(begins, ends, phases, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: -one.caused_s))


def _stretch(generation: RecordedGeneration, rank: int, waits: Waits, phase: SpeedPhase) -> Stretch:
    first, last = _waited(waits.caused_s[phase.first : phase.last + 1], rank)
    first, last = phase.first + first, phase.first + last
    rows = slice(first, last + 1)
    busy_s = float(np.nansum(generation.table.busy_s[rows, rank]))
    data_s = float(np.nansum(generation.table.data_s[rows, rank]))
    longer, often = _slower(generation.table.busy_s[rows], waits.caused_s[rows, rank], rank)
    return Stretch(
        first=generation.first + first,
        last=generation.first + last,
        speed=phase.speed,
        caused_s=float(waits.caused_s[phase.first : phase.last + 1, rank].sum()),
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
