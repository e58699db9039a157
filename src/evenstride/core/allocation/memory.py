"""Memory that a worker's share takes, learned from its peaks, and the resulting caps on shares.

The memory of a step is ``fixed + per_sample * b`` for ``b`` samples held at once. The fixed part
holds weights, gradients and optimizer states; the other part holds activations. Only peaks can be
measured, and they are noisy: allocators keep freed memory and fragment it, and the first steps are
lower because the optimizer has no states yet. Errors are not symmetric. A cap a few samples too low
costs a few per cent of speed; a cap one sample too high ends the run. So all rules err on the safe
side:

- *The highest peak of each size counts, permanently.* What was needed once is needed again, perhaps
  at the next evaluation or checkpoint. If peaks faded, a share could grow in between.
- *The line lies above every peak.* Its slope is that from the smallest to the largest size seen,
  which averages the noise over the widest span. The line is then lifted until no peak is above it.
  A high peak in between lifts the line but does not tilt it, as it would tilt a fit.
- *A share grows in steps.* The line is followed beyond the largest size by at most half the span of
  the sizes seen, and not at all if it does not rise: then something else caused the peaks.
  Otherwise only the line through the origin counts: twice the samples take at most twice the
  memory. It needs a single size, so it also governs a share's first growth. A share never grows to
  more than twice the largest size at once, because memory may jump where libraries choose another
  algorithm. The exception is a size that fills at most half of the allowed memory by that line:
  there even a jump to twice as much fits, and the split need not wait where memory is ample.
- *A size that ran is never forbidden; a size that failed is never tried again.* A later success at
  a size that failed does not lift the cap: whether fragments fit is chance, and the next attempt
  may end the run.

Guarantee, with ``f`` the fraction of the limit: let every peak be at least the true need and at
most ``1 + e`` times the need. Then the cap never takes more than ``f + e / 2`` of the limit, unless
that much has run already. If peaks are also up to ``d`` too low, it is ``f + 3/2 d + e / 2``.
A fraction of 0.9 therefore allows for noise of 20 % upwards, or of 5 % in both directions.
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
"""Fraction of the limit that may be used; the rest is for fragments and for noise in the peaks."""

# Distinct sizes kept. The outermost two give the slope, the others only lift the line.
_MOST_SIZES = 8
# The factor by which a share may exceed the largest size seen at once; and the jump in memory that
# must fit where it grows further.
_MOST_GROWTH = 2

# Halvings of the factor by which caps are raised that leave too little room.
# Eight leave less than half a per cent between too little and enough.
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The lowest straight line of its slope above all peaks, in integers.

    ``bytes(b) = top_bytes + rise_bytes * (b - top) / run`` with ``0 <= rise / run <= top_bytes /
    top``, so the fixed part is never negative.
    """

    top: int  # largest size with a known peak, in samples
    top_bytes: int  # the line at ``top``
    rise_bytes: int  # bytes that ``run`` more samples take
    run: int  # samples
    reach: int  # largest size up to which the slope is valid, in samples

    @property
    def per_sample_bytes(self) -> float:
        return self.rise_bytes / self.run

    @property
    def fixed_bytes(self) -> float:
        return self.top_bytes - self.per_sample_bytes * self.top

    def at(self, samples: int) -> float:
        return self.fixed_bytes + self.per_sample_bytes * samples

    def fitting(self, allowed_bytes: int) -> int:
        """Return the largest size that should fit; 0 or less if no size fits."""
        room = allowed_bytes - self.top_bytes
        doubled = _MOST_GROWTH * self.top
        # A peak of 0 bytes says nothing about the memory of a sample.
        proportional = self.top * allowed_bytes // self.top_bytes if self.top_bytes else doubled
        # Up to this size even a jump to twice the memory per sample fits.
        ample = proportional // _MOST_GROWTH
        believed = max(self.reach, min(proportional, max(doubled, ample)))
        if self.rise_bytes == 0:
            return believed if room >= 0 else 0
        # In integers, because rounding must not cost a sample that fits exactly.
        return min(self.top + room * self.run // self.rise_bytes, believed)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What is known about one worker's memory: the peaks of a few sizes, and what ran or failed.

    Each method that learns returns a new model, or the same object if nothing is new. So caps need
    to be computed again only if ``after is not before`` or the limit changed.

    Cost:
        ``saw`` takes 1 us if nothing is new and up to 6 us otherwise, ``cap`` takes 5 us; at
        most 1.2 kB. For ten thousand workers: 10 ms per exchange, 100 ms if all have changed.

    >>> memory = MemoryModel().saw(16, 3_200).saw(32, 4_800)
    >>> memory.cap(7_000, fraction=0.9)  # at first as if all were per sample: 32 * 6300 / 4800
    42
    >>> memory.saw(42, 5_800).cap(7_000, fraction=0.9)
    47
    """

    # Highest peak in bytes of each size in samples, by size; at most 8 sizes.
    peaks: tuple[tuple[int, int], ...] = ()
    ran: int = 0  # largest size that ran and is below all that failed; 0 if no size ran
    too_large: int | None = None  # smallest size that ran out of memory

    def saw(self, samples: int, peak_bytes: int | None) -> MemoryModel:
        """Return the model after a successful step with at most ``samples`` held at once.

        Without a known peak, the size counts only as one that ran.

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
        """Return the model after a step with ``samples``, at least 1, ran out of memory.

        The cap is then below that size, at most half-way up from the largest size that ran: one
        sample less would hardly fit.
        """
        _check_size(samples)
        if self.too_large is not None and self.too_large <= samples:
            return self
        # A size that ran may fail later, when memory is fragmented; the next smaller one counts.
        below = max((size for size, _ in self.peaks if size < samples), default=0)
        ran = self.ran if self.ran < samples else below
        return replace(self, ran=ran, too_large=samples)

    def line(self) -> MemoryLine | None:
        """Return the line above the peaks; for one size, the line through the origin."""
        if not self.peaks:
            return None
        top, high_bytes = self.peaks[-1]
        low, low_bytes = self.peaks[0]
        run, rise = top - low, max(high_bytes - low_bytes, 0)
        # A first step has a low peak because the optimizer has no states yet. A line steeper than
        # the one through the origin would need a negative fixed part.
        if rise * top >= high_bytes * run:
            run, rise = top, high_bytes
        # Height of each peak above the line through that of the largest size, times the run.
        above = max(held * run - high_bytes * run + rise * (top - b) for b, held in self.peaks)
        reach = top + (top - low) // 2 if rise else top
        # Rounded up, so that no peak is above the line.
        return MemoryLine(top, high_bytes - (-above // run), rise, run, reach)

    def cap(self, limit_bytes: int | None, fraction: float = FRACTION) -> int | None:
        """Return the most samples that may be held at once; ``None`` if that is not known yet.

        The cap is at least 1, at least every size that ran and below every size that failed. (After
        a failure at 1 it is 1: no step is possible then.) It never falls as the limit grows.
        Without a known limit, only a failure sets a cap.

        Raises:
            ConfigError: the fraction of the limit is not above 0 or exceeds 1.
        """
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"invalid memory fraction {fraction}: expected a number above 0 and at most 1; "
                f"the default {FRACTION} leaves room for fragments"
            )
        line = None if limit_bytes is None else self.line()
        most = []
        if line is not None and limit_bytes is not None:
            most.append(line.fitting(floor(fraction * limit_bytes)))
        if self.too_large is not None:
            # Half-way rather than one sample less, because that would hardly fit.
            most.append(self.ran + (self.too_large - self.ran) // 2)
        # The smaller of line and failure holds, but a size that ran stays allowed.
        return max(min(most), self.ran, 1) if most else None

    def ends_at(self, cap: int) -> bool:
        """Return whether memory sets this cap; otherwise only the growth of a share does.

        Far below the limit, a cap is twice the largest size seen, whatever a sample takes.
        """
        line = self.line()
        return self.too_large is not None or (line is not None and cap < _MOST_GROWTH * line.top)

    def reason(self) -> str:
        """Return what is known as one sentence without a full stop."""
        line, failure = self.line(), ""
        if self.too_large is not None:
            failure = f"ran out of memory at {_samples(self.too_large)}"
        if line is None:
            return failure or "its memory use is not known yet"
        return f"{self._learned(line)}; {failure}" if failure else self._learned(line)

    def _learned(self, line: MemoryLine) -> str:
        if len(self.peaks) == 1:
            return f"held up to {_readable(line.top_bytes)} with {_samples(line.top)}"
        return (
            f"holds {_readable(line.fixed_bytes)} and {_readable(line.per_sample_bytes)} per "
            f"sample, measured at {len(self.peaks)} sizes from {self.peaks[0][0]} to "
            f"{_samples(line.top)}"
        )


def _check_size(samples: int) -> None:
    if samples < 1:
        raise ConfigError(
            f"invalid memory report of {samples} samples: a step holds at least 1 at once; leave "
            "out the steps of workers that computed nothing"
        )


def _with(
    peaks: tuple[tuple[int, int], ...], samples: int, peak_bytes: int
) -> tuple[tuple[int, int], ...]:
    """Return the peaks after one more; the same object if it is no higher than the known one."""
    if peak_bytes < 0:
        raise ConfigError(
            f"invalid memory peak of {peak_bytes} bytes for {samples} samples: expected at least "
            "0; pass None if the peak is not known"
        )
    known = dict(peaks)
    if known.get(samples, -1) >= peak_bytes:
        return peaks
    known[samples] = peak_bytes
    kept = tuple(sorted(known.items()))
    return kept if len(kept) <= _MOST_SIZES else _without_least(kept)


def _without_least(peaks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the peaks without the one furthest below the line between the outermost."""
    (low, low_bytes), (top, high_bytes) = peaks[0], peaks[-1]
    run, rise = top - low, high_bytes - low_bytes
    # Only those in between: the outermost two carry the slope.
    heights = [(bytes_ - low_bytes) * run - rise * (b - low) for b, bytes_ in peaks[1:-1]]
    least = 1 + heights.index(min(heights))
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
    """The memory of all workers of a fleet; empty before the first report."""

    models: tuple[MemoryModel, ...] = ()  # of each worker
    # Most samples of each worker; ``None`` if not known yet.
    caps: tuple[int | None, ...] = ()

    def learn(self, held: Iterable[PeakMemory], workers: int, fraction: float) -> Memory:
        """Return the memory after an exchange; the same object if nothing was reported.

        Reports with an unknown worker or without samples are ignored.
        """
        # A rank of -1 would otherwise count for the last worker.
        reports = [h for h in held if 0 <= h.worker < workers and h.samples > 0]
        if not reports:
            return self
        models = list(self.models) or [MemoryModel()] * workers
        caps = list(self.caps) or [None] * workers
        for each in reports:
            models[each.worker] = models[each.worker].saw(each.samples, each.peak_bytes)
            caps[each.worker] = models[each.worker].cap(each.limit_bytes, fraction)
        return Memory(tuple(models), tuple(caps))

    def of(self, ranks: tuple[int, ...]) -> Memory:
        if not self.models or len(ranks) == len(self.models):
            return self
        return Memory(tuple(self.models[k] for k in ranks), tuple(self.caps[k] for k in ranks))

    def following(self, workers: tuple[Worker, ...], former: tuple[Worker, ...]) -> Memory:
        """Return the memory for another generation, with what is known about workers that stay."""
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
        """Return the fleet with every worker's share also bounded by its memory.

        Caps that leave no room for the global batch are raised, all by the same factor: a run that
        may run out of memory is better than one that cannot continue.
        """
        bound, low, high = self._raised(fleet, 1.0), 1.0, 2.0
        if bound is not None:
            return bound
        # This ends: caps above the fleet's own bounds have no effect.
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
        """Return whether the fleet's global batch fits, as far as known, with no cap raised."""
        return not self.caps or self._raised(fleet, 1.0) is not None

    def _raised(self, fleet: Fleet, factor: float) -> Fleet | None:
        """Return the fleet under caps raised by a factor; ``None`` if they leave too little."""
        pairs = zip(fleet.workers, self.caps, strict=True)
        workers = tuple(_bounded(worker, cap, factor, fleet.global_batch) for worker, cap in pairs)
        try:
            bound = replace(fleet, workers=workers)
            # `Fleet` checks the bounds in samples; in whole micro-batches less may fit.
            whole_lower(bound.lower, bound.upper, bound.global_batch, bound.quanta)
        except InfeasibleShares:
            # Caps without effect are not the cause, and raising them would never end.
            return None if workers != fleet.workers else fleet
        return bound

    def ends(self, rank: int) -> int | None:
        """Return the most samples that a worker's memory can hold; ``None`` if not known yet."""
        cap = self.caps[rank] if self.caps else None
        return cap if cap is not None and self.models[rank].ends_at(cap) else None

    def reason(self, before: Memory, workers: tuple[Worker, ...], global_batch: int) -> str:
        """Return a clause about new caps, or nothing; it names at most two workers."""
        was = before.caps or (None,) * len(self.caps)
        news = [rank for rank, cap in enumerate(self.caps) if cap != was[rank]]
        # A cap that is not below the global batch has no effect.
        binding = [r for r in news if (self.caps[r] or global_batch) < global_batch]
        named = [
            f"{workers[r].name} may {'grow to' if self.ends(r) is None else 'hold'} "
            f"{self.caps[r]} ({self.models[r].reason()})"
            for r in binding[:2]
        ]
        return "; memory: " + ", ".join(named) if named else ""


def _bounded(worker: Worker, cap: int | None, factor: float, global_batch: int) -> Worker:
    if cap is None:
        return worker
    # A cap below one whole micro-batch would make the fleet infeasible. Raising all caps until
    # this one fits would give the other workers more than they can hold.
    least = worker.min_share + -worker.min_share % worker.multiple
    most = max(ceil(cap * factor), least)
    # No share exceeds the batch. Otherwise caps of a worker without a limit would rise forever.
    highest = global_batch if worker.max_share is None else worker.max_share
    if highest <= most:
        return worker
    return replace(worker, max_share=most)


def within(shares: Shares, fleet: Fleet) -> Shares:
    """Return the nearest split that keeps the fleet's bounds; workers at 0 stay at 0.

    Samples above a bound go to the other workers in proportion to their room.
    """
    at = as_array(shares)
    over = at - fleet.upper
    if (over <= 0).all():
        return shares
    clipped = at.clip(max=fleet.upper)
    room = fleet.upper - clipped
    # A worker at 0 was left out on purpose; the bounds of others do not bring it back.
    room[at == 0] = 0
    missing = int(at.sum() - clipped.sum())
    if int(room.sum()) < missing:  # workers at 0 are needed
        room = fleet.upper - clipped
    given = apportion(room.astype(float), missing, room * 0, room)
    return as_shares(clipped + given)
