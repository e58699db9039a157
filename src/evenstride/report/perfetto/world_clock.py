"""Steps of a run on the clock of the world, those of one process behind those before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.analysis.splits import split_rows, split_share
from evenstride.report.analysis.step_clock import spans_s
from evenstride.report.wording import duration

BASE_S = 7_889_238
"""torch.profiler counts from the last whole multiple of this since 1970, a quarter of a year, so
that times in microseconds keep their nanoseconds as JSON numbers."""
_LATEST_S = 4.0e9
_LEAST_TOLD_S = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A generation whose times are nanoseconds since the base of the trace.

    Args:
        generation: of workers.
        began_ns: when the clock of its process began.
        after_ns: when the step before its first one ended, or that clock began.
        begins_ns: when each step began, ``(steps,)``.
        ends_ns: when it ended: as its gradients were averaged. Never before it began, nor after
            the next one began.
        passes: first step of each pass over the data, and the epoch that it is in, in order.
        split_rows: for each step, the row that shows the split in force at it, ``(steps,)``.
    """

    generation: RecordedGeneration
    began_ns: int
    after_ns: int
    begins_ns: IntArray
    ends_ns: IntArray
    passes: tuple[tuple[int, int], ...]
    split_rows: IntArray

    def share(self, rank: int) -> FloatArray:
        """Return a worker's samples in the split of each step; not a number if nothing was told."""
        return split_share(self.generation, rank, self.split_rows)

    def at_ns(self, at_s: float) -> int:
        """Return a moment of the process's clock."""
        return self.began_ns + _ns(at_s)

    def epochs(self, first: int, last: int) -> list[int | None]:
        """Return the epochs of some steps, counted from 0; ``None`` where that is not known.

        Args:
            first: row of the first of them.
            last: row behind the last.
        """
        if not self.passes:
            return [None] * (last - first)
        steps = self.generation.first + np.arange(first, last)
        begins, epochs = zip(*self.passes, strict=True)
        at = np.searchsorted(np.array(begins), steps, side="right") - 1
        return [epochs[k] if k >= 0 else None for k in at.tolist()]


def base_of(lives: list[LeaderProcess]) -> int:
    """Return the moment that times are counted from, in nanoseconds since 1970."""
    told = [_began_s(life) for life in lives]
    first_s = min((s for s in told if s is not None), default=0.0)
    return int(first_s) // BASE_S * BASE_S * 1_000_000_000


def place(lives: list[LeaderProcess], base_ns: int) -> tuple[list[Placed], list[str]]:
    """Return all generations of a run in order, and what is not as it was told, in sentences.

    Args:
        lives: of the run's leaders, in the order of the trace.
        base_ns: nanoseconds since 1970 that times are counted from.
    """
    found: list[Placed] = []
    notes: list[str] = []
    ended_ns: int | None = None
    for number, life in enumerate(lives, start=1):
        spans = [spans_s(one) for one in life.generations]
        began_ns, note = _began(life, number, spans, base_ns, ended_ns)
        notes += [note] if note else []
        for generation, (begins_s, ends_s) in zip(life.generations, spans, strict=True):
            least = began_ns if ended_ns is None else ended_ns
            begins_ns, ends_ns = began_ns + _all_ns(begins_s), began_ns + _all_ns(ends_s)
            if len(begins_ns) and begins_ns[0] < least:  # of one process, so by little
                begins_ns, ends_ns = (at + (least - begins_ns[0]) for at in (begins_ns, ends_ns))
            passes = tuple((one.step, int(one.epochs + 1e-6)) for one in life.passes)
            spanned = (began_ns, least, begins_ns, ends_ns, passes)
            found.append(Placed(generation, *spanned, split_rows(generation)))
            if len(ends_ns):
                ended_ns = int(ends_ns[-1])
    return found, notes


def _began(
    life: LeaderProcess,
    number: int,
    spans: list[tuple[FloatArray, FloatArray]],
    base_ns: int,
    ended_ns: int | None,
) -> tuple[int, str]:
    """Return when a process's clock began, and what is to be said of it."""
    first_s = min((float(begins_s[0]) for begins_s, _ in spans if len(begins_s)), default=0.0)
    behind_ns = max((ended_ns or 0) - _ns(first_s), 0)
    began_s = _began_s(life)
    if began_s is None:
        where = "at 1970" if ended_ns is None else "right behind the one before"
        return behind_ns, f"process {number} does not tell when it began; it is shown {where}"
    began_ns = round(began_s * 1e6) * 1000 - base_ns
    if ended_ns is None or began_ns >= behind_ns or not spans:
        return began_ns, ""
    early_s = (behind_ns - began_ns) / 1e9
    if early_s < _LEAST_TOLD_S:
        return behind_ns, ""
    return behind_ns, (
        f"by its clock process {number} began its steps {duration(early_s)} before the last step "
        "of the one before had ended; it is shown behind that"
    )


def _began_s(life: LeaderProcess) -> float | None:
    began_s = life.began_unix_s
    return began_s if began_s is not None and 0.0 <= began_s <= _LATEST_S else None


def _ns(at_s: float) -> int:
    return round(min(max(at_s, 0.0), _LATEST_S) * 1e9)


def _all_ns(at_s: FloatArray) -> IntArray:
    return np.asarray(np.round(np.clip(at_s, 0.0, _LATEST_S) * 1e9), dtype=np.int64)
