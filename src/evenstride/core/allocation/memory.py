"""How much memory a worker's share takes, learned from its peaks, and what that allows a fleet.

The memory of a step is ``fixed + per_sample * b`` for ``b`` samples held at once: weights,
gradients and optimizer states, then activations. What is measured are peaks, and they are noisy:
allocators keep what was freed and cut it into pieces, and first steps are lower, as the optimizer
has no states yet. Being wrong is not symmetric. A cap a few samples too low costs a few per cent
of speed, one a sample too high ends the run. So everything here errs on one side:

- *Of each size the highest peak counts, and for good.* What was needed once is needed again, at the
  next evaluation or checkpoint perhaps. Peaks that faded would let a share grow in between.
- *The line lies above every peak.* Its slope is that from the smallest to the largest size seen,
  which averages the noise over the widest span there is; it is then lifted until no peak is above
  it. A high peak in between lifts the line and does not tilt it, as it would tilt a fit.
- *A share grows in steps.* The line is followed beyond the largest size by half the span of the
  sizes seen at most, and not at all if it does not rise: then something else made the peaks.
  Otherwise only the line through the origin is believed: twice the samples take at most twice the
  memory. That one needs a single size, so it is also how a share grows at first. It never grows to
  more than twice the largest size at once, as memory may jump where libraries choose another
  algorithm, unless it then fills half of what is allowed by that line: even a jump to twice as much
  would fit, and a split need not wait where memory is ample.
- *What ran is never forbidden, what failed is never tried again.* A later success at a size that
  failed does not lift the cap: whether fragments fit is chance, and the next time may end the run.

What holds, with ``f`` the fraction of the limit: let every peak be at least the true need and at
most ``1 + e`` times as much. Then the cap never takes more than ``f + e / 2`` of the limit, unless
that much has run already. With peaks that are also up to ``d`` too low it is ``f + 3/2 d + e / 2``.
So a fraction of 0.9 allows for noise of 20 % upwards, or of 5 % both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor

from evenstride.core.allocation.integer_splits import apportion, whole_lower
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_array, as_shares
from evenstride.core.time_model.observation import PeakMemory
from evenstride.errors import ConfigError, InfeasibleShares

FRACTION = 0.9
"""Part of the limit that may be used: the rest is for fragments and for noise in the peaks."""

# Distinct sizes kept. The outermost two carry the slope, the others only lift the line.
_MOST_SIZES = 8
# How many times the largest size seen a share may grow to at once; and how large a jump in memory
# is allowed for where it grows further.
_MOST_GROWTH = 2

# How often the factor is halved by which caps are raised that leave too little room.
# Eight leave less than half a per cent of the factor between too little and enough.
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The least straight line of its slope above all peaks, in whole numbers.

    ``bytes(b) = top_bytes + rise_bytes * (b - top) / run`` with ``0 <= rise / run <= top_bytes /
    top``, so the fixed part is never negative.
    """

    top: int  # largest size with a known peak, in samples
    top_bytes: int  # the line there
    rise_bytes: int  # bytes that ``run`` more samples take
    run: int  # samples
    reach: int  # largest size up to which the slope is believed, in samples

    @property
    def per_sample_bytes(self) -> float:
        return self.rise_bytes / self.run

    @property
    def fixed_bytes(self) -> float:
        return self.top_bytes - self.per_sample_bytes * self.top

    def at(self, samples: int) -> float:
        return self.fixed_bytes + self.per_sample_bytes * samples

    def fitting(self, allowed_bytes: int) -> int:
        """Return the largest size that is believed to fit; not above 0 if none is."""
        room = allowed_bytes - self.top_bytes
        doubled = _MOST_GROWTH * self.top
        # A peak of 0 bytes shows nothing of what a sample takes.
        proportional = self.top * allowed_bytes // self.top_bytes if self.top_bytes else doubled
        # Up to here even a jump to twice the memory per sample would fit.
        ample = proportional // _MOST_GROWTH
        believed = max(self.reach, min(proportional, max(doubled, ample)))
        if self.rise_bytes == 0:
            return believed if room >= 0 else 0
        # In whole numbers, as rounding must not cost the sample that fits exactly.
        return min(self.top + room * self.run // self.rise_bytes, believed)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What is known of one worker's memory: the peaks of a few sizes, what ran and what did not.

    Each method that learns returns another one, or the same object if nothing is new, so caps need
    only be asked for again where ``after is not before`` or the limit moved.

    Cost:
        ``saw`` takes 1 us where nothing is new and up to 6 us where something is, ``cap`` 5 us; at
        most 1.2 kB. Ten thousand workers: 10 ms an exchange, 100 ms where all have changed.

    >>> memory = MemoryModel().saw(16, 3_200).saw(32, 4_800)
    >>> memory.cap(7_000, fraction=0.9)  # as if all were per sample, at first: 32 * 6300 / 4800
    42
    >>> memory.saw(42, 5_800).cap(7_000, fraction=0.9)
    47
    """

    # Highest peak in bytes of each size in samples, by size; at most 8 sizes.
    peaks: tuple[tuple[int, int], ...] = ()
    ran: int = 0  # largest size that ran and lies below all that failed; 0 if none did
    too_large: int | None = None  # smallest size that ran out of memory

    def saw(self, samples: int, peak_bytes: int | None) -> MemoryModel:
        """Return the model after a step with at most so many samples held at once went well.

        Without a known peak, only the size counts as one that ran.

        Raises:
            ConfigError: a size below 1 or a negative peak.
        """
        _check_size(samples)
        ran = samples if self.ran < samples < (self.too_large or samples + 1) else self.ran
        peaks = self.peaks if peak_bytes is None else _with(self.peaks, samples, peak_bytes)
        if peaks is self.peaks and ran == self.ran:
            return self
        return replace(self, peaks=peaks, ran=ran)

    def failed(self, samples: int) -> MemoryModel:
        """Return the model after a step with so many samples, at least 1, ran out of memory.

        From then on the cap is below that size, at most half-way up from the largest size that ran:
        one sample less would hardly do.
        """
        _check_size(samples)
        if self.too_large is not None and self.too_large <= samples:
            return self
        # A size that ran may fail later, when memory is fragmented: the next smaller one counts.
        below = max((size for size, _ in self.peaks if size < samples), default=0)
        ran = self.ran if self.ran < samples else below
        return replace(self, ran=ran, too_large=samples)

    def line(self) -> MemoryLine | None:
        """Return the line above the peaks; with one size, that through the origin."""
        if not self.peaks:
            return None
        top, high_bytes = self.peaks[-1]
        low, low_bytes = self.peaks[0]
        run, rise = top - low, max(high_bytes - low_bytes, 0)
        # A first step has a low peak, as the optimizer has no states yet. A line that is steeper
        # than the one through the origin would need a negative fixed part.
        if rise * top >= high_bytes * run:  # steeper than if there were no fixed part at all
            run, rise = top, high_bytes
        # How far each peak is above the line through that of the largest size, times the run.
        above = max(held * run - high_bytes * run + rise * (top - b) for b, held in self.peaks)
        reach = top + (top - low) // 2 if rise else top
        # Rounded up, so that no peak is a byte above the line.
        return MemoryLine(top, high_bytes - (-above // run), rise, run, reach)

    def cap(self, limit_bytes: int | None, fraction: float = FRACTION) -> int | None:
        """Return the most samples that may be held at once; ``None`` while there is no telling.

        At least 1, at least every size that ran and below every size that failed. (After a failure
        at 1 it is 1 all the same: no step is possible then.) Never falls as the limit grows.
        Without a known limit, only a failure caps.

        Raises:
            ConfigError: the fraction of the limit is not above 0 and at most 1.
        """
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"a memory fraction of {fraction} was asked for; it is a part of the limit, above "
                f"0 and at most 1; {FRACTION} leaves room for fragments"
            )
        line = None if limit_bytes is None else self.line()
        most = []
        if line is not None and limit_bytes is not None:
            most.append(line.fitting(floor(fraction * limit_bytes)))
        if self.too_large is not None:
            # Half-way rather than one sample less, which would hardly fit either.
            most.append(self.ran + (self.too_large - self.ran) // 2)
        # The smaller of line and failure holds, but what ran once stays allowed whatever it took.
        return max(min(most), self.ran, 1) if most else None

    def ends_at(self, cap: int) -> bool:
        """Return whether memory ends at a cap; else a share only grows no faster than that.

        Far below the limit, a cap is twice the largest size seen, whatever memory a sample takes.
        """
        line = self.line()
        return self.too_large is not None or (line is not None and cap < _MOST_GROWTH * line.top)

    def reason(self) -> str:
        """Return what is known as one sentence without its full stop."""
        line, failure = self.line(), ""
        if self.too_large is not None:
            failure = f"ran out of memory at {_samples(self.too_large)}"
        if line is None:
            return failure or "nothing is known of its memory yet"
        return f"{self._learned(line)}; {failure}" if failure else self._learned(line)

    def _learned(self, line: MemoryLine) -> str:
        if len(self.peaks) == 1:
            return f"held up to {_readable(line.top_bytes)} with {_samples(line.top)}"
        return (
            f"holds {_readable(line.fixed_bytes)} and {_readable(line.per_sample_bytes)} per "
            f"sample, by {len(self.peaks)} sizes from {self.peaks[0][0]} to {_samples(line.top)}"
        )


def _check_size(samples: int) -> None:
    if samples < 1:
        raise ConfigError(
            f"memory was told for {samples} samples; a step holds at least 1 at once; leave out "
            "the steps of a worker that computed nothing"
        )


def _with(
    peaks: tuple[tuple[int, int], ...], samples: int, peak_bytes: int
) -> tuple[tuple[int, int], ...]:
    """Return the peaks after one more; the same object if it is no higher than the known one."""
    if peak_bytes < 0:
        raise ConfigError(
            f"a peak of {peak_bytes} bytes was told for {samples} samples; it is at least 0; "
            "tell None where it is not known"
        )
    known = dict(peaks)
    if known.get(samples, -1) >= peak_bytes:
        return peaks
    known[samples] = peak_bytes
    kept = tuple(sorted(known.items()))
    return kept if len(kept) <= _MOST_SIZES else _without_least(kept)


def _without_least(peaks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the peaks without the one that is furthest below the line between the outermost."""
    (low, low_bytes), (top, high_bytes) = peaks[0], peaks[-1]
    run, rise = top - low, high_bytes - low_bytes
    # Only those in between: the outermost two carry the slope.
    told = [(bytes_ - low_bytes) * run - rise * (b - low) for b, bytes_ in peaks[1:-1]]
    least = 1 + told.index(min(told))
    return peaks[:least] + peaks[least + 1 :]


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"


def _readable(bytes_: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_ >= size:
            return f"{bytes_ / size:.3g} {unit}"
    return f"{bytes_:.3g} B"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all workers of a fleet; empty until one has told of it."""

    models: tuple[MemoryModel, ...] = ()  # of each worker
    # Most samples of each worker; ``None`` where there is no telling.
    caps: tuple[int | None, ...] = ()

    def learn(self, held: Iterable[PeakMemory], workers: int, fraction: float) -> Memory:
        """Return the memory after an exchange; the same object if no cap has changed for it.

        Reports of workers or sizes that there are not are left out.
        """
        # A rank of -1 would otherwise teach the last worker.
        told = [h for h in held if 0 <= h.worker < workers and h.samples > 0]
        if not told:
            return self
        models = list(self.models) or [MemoryModel()] * workers
        caps = list(self.caps) or [None] * workers
        for each in told:
            models[each.worker] = models[each.worker].saw(each.samples, each.peak_bytes)
            caps[each.worker] = models[each.worker].cap(each.limit_bytes, fraction)
        return Memory(tuple(models), tuple(caps))

    def of(self, ranks: tuple[int, ...]) -> Memory:
        if not self.models or len(ranks) == len(self.models):
            return self
        return Memory(tuple(self.models[k] for k in ranks), tuple(self.caps[k] for k in ranks))

    def following(self, workers: tuple[Worker, ...], former: tuple[Worker, ...]) -> Memory:
        """Return the memory for another generation: what is known of those who stay."""
        if not self.models:
            return Memory()
        # By name, because another generation may number its ranks differently.
        known = {worker.name: rank for rank, worker in enumerate(former)}
        ranks = [known.get(worker.name) for worker in workers]
        return Memory(
            tuple(MemoryModel() if rank is None else self.models[rank] for rank in ranks),
            tuple(None if rank is None else self.caps[rank] for rank in ranks),
        )

    def bound(self, fleet: Fleet) -> Fleet:
        """Return the fleet with every worker's share bounded by its memory, too.

        Caps that leave no room for the global batch are raised, all by the same factor: a run that
        may end for want of memory is better than one that has ended.
        """
        bound, low, high = self._raised(fleet, 1.0), 1.0, 2.0
        if bound is not None:
            return bound
        # This ends: caps that have grown beyond the fleet's own bounds change nothing any more.
        while (bound := self._raised(fleet, high)) is None:
            low, high = high, 2.0 * high
        # No higher than the batch demands, because every sample above a cap may end the run.
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            better = self._raised(fleet, middle)
            if better is None:
                low = middle
            else:
                bound, high = better, middle
        return bound

    def fits(self, fleet: Fleet) -> bool:
        """Return whether the fleet's global batch fits, as far as is known, with no cap raised."""
        return not self.caps or self._raised(fleet, 1.0) is not None

    def _raised(self, fleet: Fleet, factor: float) -> Fleet | None:
        """Return the fleet under caps that are so much higher, unless they leave too little."""
        pairs = zip(fleet.workers, self.caps, strict=True)
        workers = tuple(_bounded(worker, cap, factor) for worker, cap in pairs)
        try:
            bound = replace(fleet, workers=workers)
            # `Fleet` checks the bounds in samples; in whole micro-batches less may fit.
            whole_lower(bound.lower, bound.upper, bound.global_batch, bound.quanta)
        except InfeasibleShares:
            # Caps that bound no one are not the cause, and raising them would never end.
            return None if workers != fleet.workers else fleet
        return bound

    def ends(self, rank: int) -> int | None:
        """Return the most samples that fit into a worker's memory; ``None`` if not known yet."""
        cap = self.caps[rank] if self.caps else None
        return cap if cap is not None and self.models[rank].ends_at(cap) else None

    def reason(self, before: Memory, workers: tuple[Worker, ...], global_batch: int) -> str:
        """Return a clause about the caps that are new, or nothing; at most two are named."""
        was = before.caps or (None,) * len(self.caps)
        news = [rank for rank, cap in enumerate(self.caps) if cap != was[rank]]
        # A cap that is no lower than the global batch limits nothing.
        binding = [r for r in news if (self.caps[r] or global_batch) < global_batch]
        named = [
            f"{workers[r].name} may {'grow to' if self.ends(r) is None else 'hold'} "
            f"{self.caps[r]} ({self.models[r].reason()})"
            for r in binding[:2]
        ]
        return "; memory: " + ", ".join(named) if named else ""


def _bounded(worker: Worker, cap: int | None, factor: float) -> Worker:
    if cap is None:
        return worker
    # A cap below one whole micro-batch would make the fleet infeasible, and raising all caps until
    # this one fits would give the other workers more than they can hold.
    least = worker.min_share + -worker.min_share % worker.quantum
    most = max(ceil(cap * factor), least)
    if worker.max_share is not None and worker.max_share <= most:
        return worker
    return replace(worker, max_share=most)


def within(shares: Shares, fleet: Fleet) -> Shares:
    """Return the split next to another one that keeps the fleet's bounds; workers at 0 stay.

    What a bound takes away goes to the others in proportion to the room they have.
    """
    at = as_array(shares)
    over = at - fleet.upper
    if (over <= 0).all():
        return shares
    clipped = at.clip(max=fleet.upper)
    room = fleet.upper - clipped
    # A worker at 0 was left out on purpose; bounds of the others are no reason to take it back.
    room[at == 0] = 0
    missing = int(at.sum() - clipped.sum())
    if int(room.sum()) < missing:  # those at 0 are needed
        room = fleet.upper - clipped
    given = apportion(room.astype(float), missing, room * 0, room)
    return as_shares(clipped + given)
