"""Tell a change of speed from noise and from a spike, for all workers at once.

Three tests, on a worker's times as parts of their prediction:

* A time far *below* its prediction cannot be a spike: the worker is faster, at once.
* A time far *above* it is a spike (garbage collection, page cache) or a change. As many in a
  row as spikes alone could hardly explain are a change. How many that is follows from how often
  this worker spikes: two as a rule, one for a worker that never does, three for a nervous one.
* Changes too small for either show in a two-sided CUSUM of the standardised residuals, which
  also tells when they began, so that the new speed is the mean since then.

Source:
    Page, "Continuous inspection schemes", Biometrika 41 (1954) for the CUSUM. The rule for
    spikes is the posterior odds of a change against a run of independent spikes; ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstride.core.fleet import FloatArray, IntArray

# Further than this, in standard deviations and in parts, a time is no noise.
_FAR_STD, _FAR_PART = 4.0, 0.10
# CUSUM: half the smallest shift worth finding and the alarm level, in standard deviations. A
# false alarm then comes about once in 140,000 steps of normal noise (Siegmund's approximation).
_SLACK, _ALARM = 0.5, 10.0
# Chance per step that the speed changes, and what is believed of spikes before any was seen.
_HAZARD, _SPIKES_FIRST, _STEPS_FIRST = 1e-3, 0.5, 100.0

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What is remembered of ``W`` workers' recent residuals; all arrays have first dimension W.

    Args:
        run: slow outliers in a row that are held back.
        run_sum: sum of their times as parts of their predictions.
        spikes: steps that turned out to be spikes.
        steps: steps judged.
        cusum: ``(W, 2)``, how far residuals have drifted up and down.
        since: ``(W, 2)``, steps since each of the two was last 0.
        sums: ``(W, 2)``, sum of the residuals since then, in parts.
    """

    run: FloatArray
    run_sum: FloatArray
    spikes: FloatArray
    steps: FloatArray
    cusum: FloatArray
    since: FloatArray
    sums: FloatArray

    @classmethod
    def none(cls, workers: int) -> Changes:
        """Return the memory before anything was seen."""
        flat, pair = np.zeros(workers), np.zeros((workers, 2))
        return cls(flat, flat, flat, flat, pair, pair, pair)

    def judge(
        self, workers: IntArray, part: FloatArray, std: FloatArray, steps: IntArray
    ) -> tuple[Changes, Judgement]:
        """Judge one new time of some workers, each at most once.

        Args:
            workers: whose they are, ``(n,)``.
            part: each time as a part of its prediction, ``(n,)``.
            std: standard deviation of that part if nothing has changed, ``(n,)``.
            steps: steps that each time is the median of, ``(n,)``.
        """
        off = part - 1.0
        far = (np.abs(off) > _FAR_STD * std) & (np.abs(off) > _FAR_PART)
        fast, slow = far & (off < 0), far & (off > 0)
        run = np.where(slow, self.run[workers] + (steps + 1) // 2, 0.0)
        run_sum = np.where(slow, self.run_sum[workers] + part * ((steps + 1) // 2), 0.0)
        spike_rate = (self.spikes[workers] + _SPIKES_FIRST) / (self.steps[workers] + _STEPS_FIRST)
        confirmed = slow & (spike_rate**run < _HAZARD)
        drift = _Drift.of(self, workers, np.where(far, 0.0, off), std, steps)
        drifted = drift.alarm & ~far

        ratio = np.where(fast, part, np.where(confirmed, run_sum / np.maximum(run, 1.0), 1.0))
        ratio = np.where(drifted, 1.0 + drift.mean, ratio)
        told = np.where(confirmed, run, np.where(drifted, drift.length, steps))
        jumped = fast | confirmed | drifted
        judgement = Judgement(jumped, slow & ~confirmed, ratio, told)

        after = replace(self, **{name: getattr(self, name).copy() for name in self.__slots__})
        # A run that ended without being confirmed was spikes.
        after.spikes[workers] += np.where(slow, 0.0, self.run[workers])
        after.steps[workers] += steps
        after.run[workers] = np.where(confirmed, 0.0, run)
        after.run_sum[workers] = np.where(confirmed, 0.0, run_sum)
        drift.put(after, workers, keep=~jumped, skip=far)
        return after, judgement


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What some workers' new times mean, arrays of shape ``(n,)``.

    Args:
        jumped: the speed has changed.
        held: a slow time that may be a spike: not to be learned from yet.
        ratio: new times as parts of those predicted, where it changed.
        told: steps that the ratio is a mean of.
    """

    jumped: Mask
    held: Mask
    ratio: FloatArray
    told: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Drift:
    """The two one-sided sums after a residual: up in column 0, down in column 1."""

    cusum: FloatArray
    since: FloatArray
    sums: FloatArray

    @classmethod
    def of(
        cls, before: Changes, workers: IntArray, off: FloatArray, std: FloatArray, steps: IntArray
    ) -> _Drift:
        sign = np.array([1.0, -1.0])
        # The mean of m steps says as much as m residuals that are sqrt(m) times noisier.
        score = np.sqrt(steps) * off / np.maximum(std, 1e-9)
        cusum = before.cusum[workers] + score[:, None] * sign - _SLACK * steps[:, None]
        going = cusum > 0
        return cls(
            np.where(going, cusum, 0.0),
            np.where(going, before.since[workers] + steps[:, None], 0.0),
            np.where(going, before.sums[workers] + (off * steps)[:, None], 0.0),
        )

    @property
    def alarm(self) -> Mask:
        return np.asarray((self.cusum > _ALARM).any(axis=1))

    @property
    def _side(self) -> IntArray:
        return np.asarray(self.cusum.argmax(axis=1))

    @property
    def length(self) -> FloatArray:
        return np.maximum(self.since[np.arange(len(self.since)), self._side], 1.0)

    @property
    def mean(self) -> FloatArray:
        return np.asarray(self.sums[np.arange(len(self.sums)), self._side] / self.length)

    def put(self, after: Changes, workers: IntArray, *, keep: Mask, skip: Mask) -> None:
        """Write the sums where a time was judged (not ``skip``); empty ones unless ``keep``."""
        for name in ("cusum", "since", "sums"):
            column = getattr(after, name)
            new = np.where(keep[:, None], getattr(self, name), 0.0)
            column[workers] = np.where((skip & keep)[:, None], column[workers], new)
