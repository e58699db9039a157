"""How much memory a worker's share takes, learned from the peaks it has had.

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
  memory, whatever the fixed part. That one needs a single size, so it is also how a share grows at
  first. It never grows to more than twice the largest size at once, as memory may jump where
  libraries choose another algorithm, unless it then fills half of what is allowed by that line:
  even a jump to twice as much would fit, and a split need not wait where memory is ample. Each
  size that ran allows the next.
- *What ran is never forbidden, what failed is never tried again.* A later success at a size that
  failed does not lift the cap: whether fragments fit is chance, and the next time may end the run.

What holds, with ``f`` the fraction of the limit: let every peak be at least the true need and at
most ``1 + e`` times as much. Then the cap never takes more than ``f + e / 2`` of the limit, unless
that much has run already. With peaks that are also up to ``d`` too low it is ``f + 3/2 d + e / 2``.
So a fraction of 0.9 allows for noise of 20 % upwards, or of 5 % both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

from evenstride.errors import ConfigError

FRACTION = 0.9
"""Part of the limit that may be used: the rest is for fragments and for noise in the peaks."""

# Distinct sizes kept. The outermost two carry the slope, the others only lift the line.
_MOST_SIZES = 8
# How many times the largest size seen a share may grow to at once; and how large a jump in memory
# is allowed for where it grows further.
_MOST_GROWTH = 2


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most memory that one worker has held between two exchanges."""

    worker: int  # rank
    samples: int  # of the largest batch it held at once
    peak_bytes: int | None  # the most it held meanwhile; ``None`` if not known
    limit_bytes: int | None  # the most it can have at this moment; ``None`` if not known


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

    A value: each method that learns returns another one, or the same object if nothing is new,
    so whoever keeps caps need only ask again where ``after is not before`` or the limit moved.

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

        Args:
            samples: of the largest micro-batch; at least 1.
            peak_bytes: the most memory the worker held meanwhile; ``None`` if not known, then only
                the size counts as one that ran.

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
        """Return the model after a step with so many samples ran out of memory.

        From then on the cap is below that size, at most half-way up from the largest size that ran:
        one sample less would hardly do.

        Raises:
            ConfigError: a size below 1.
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

        Args:
            limit_bytes: the most memory the worker can have; ``None`` if not known, then only a
                failure caps.
            fraction: part of it that may be used, above 0 and at most 1.

        Raises:
            ConfigError: the fraction is outside of that.
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
