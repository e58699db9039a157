"""Virtual workers: their true time curves, the noise of their steps, and their reports.

Workers in lockstep report the same steps; others report their own updates, each with its own
count. `Bands` is `ToleranceBand` for all workers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstride.core.control.events import Expect
from evenstride.core.control.schedule import (
    ASKS_AT,
    HICCUP_S,
    MOST_OFF,
    TOLERATED,
    ToleranceBand,
)
from evenstride.core.fleet import FloatArray, IntArray, Shares, Worker, as_array
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.sim.scenario.scenario_model import Scenario, WorkerGroup

_MOST = 2**53  # samples; floats are exact up to it
_NEVER = 2**62  # samples that no share reaches

_LONGEST_LOG = float(np.log(1000.0))  # of a step's noise; heavy tails would overflow at some time


@dataclass(frozen=True, slots=True, eq=False)
class TrueTimes:
    """The true mean curves of ``W`` workers at one moment; a `StepTimes`.

    ``t(b) = max(floor, fixed + c n + (beyond - 1) c max(0, n - knee)) / speed``, where ``c`` is
    the time per sample and ``n`` is ``b`` rounded up to whole waves: above its knee a worker is
    saturated, and every sample costs more. Above ``cliff_at`` samples, ``cliff`` times as much.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray
    knee: FloatArray
    beyond: FloatArray
    wave: IntArray
    cliff_at: IntArray
    cliff: FloatArray
    speed: FloatArray

    def at(self, shares: IntArray) -> FloatArray:
        return self._times(shares, np.where(shares > self.cliff_at, self.cliff, 1.0))

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share that ends by the deadline (0 if no share does)."""
        most = np.minimum(self._last(deadline_s, np.ones_like(self.cliff)), self.cliff_at)
        if (self.cliff_at == _NEVER).all():
            return most
        return np.maximum(most, self._last(deadline_s, self.cliff))

    def _times(self, shares: IntArray, factor: FloatArray) -> FloatArray:
        """Return the times of shares that all take ``factor`` times the usual, ``(W,)``."""
        whole = -(-shares // self.wave) * self.wave
        above = np.maximum(whole - self.knee, 0.0)
        linear = self.fixed_s + self.per_sample_s * (whole + (self.beyond - 1.0) * above)
        return np.asarray(np.maximum(self.floor_s, linear) * factor / self.speed)

    def _last(self, deadline_s: float, factor: FloatArray) -> IntArray:
        """Return the largest shares in time, in whole waves, if all take ``factor`` times."""
        plain = (deadline_s * self.speed / factor - self.fixed_s) / self.per_sample_s
        below = np.minimum(plain, self.knee)
        waves = (below + (plain - below) / self.beyond) / self.wave
        share = np.clip(np.floor(waves), 0, _MOST // self.wave).astype(np.int64) * self.wave
        share += self.wave * (self._times(share + self.wave, factor) <= deadline_s)
        share -= self.wave * ((share > 0) & (self._times(share, factor) > deadline_s))
        return np.where(self.floor_s * factor / self.speed > deadline_s, 0, share)

    def at_speed(self, speed: FloatArray) -> TrueTimes:
        return replace(self, speed=speed)

    def of(self, workers: IntArray) -> TrueTimes:
        return TrueTimes(*(getattr(self, name)[workers] for name in self.__slots__))


class Cluster:
    """All workers of a scenario."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        groups = [group for group in scenario.workers for _ in range(group.count)]
        size = len(groups)

        def column(name: str) -> FloatArray:
            return np.array([getattr(group, name) for group in groups], dtype=np.float64)

        knee = [np.inf if g.saturates_at is None else g.saturates_at for g in groups]
        cliffs = [_NEVER if g.cliff_at is None else g.cliff_at for g in groups]
        self.usual = TrueTimes(
            column("fixed_s"),
            1.0 / column("samples_per_s"),
            column("floor_s"),
            np.array(knee, dtype=np.float64),
            column("beyond"),
            np.array([group.wave for group in groups], dtype=np.int64),
            np.array(cliffs, dtype=np.int64),
            column("cliff_factor"),
            np.ones(size),
        )
        self.workers = tuple(_named(groups))
        self._noise, self._spike_rate = StepNoise(groups, seed), column("spike_rate")
        self._spike_factor = column("spike_factor")
        self.handling_s = column("handling_s")
        self._new_share_s, self._had = column("new_share_s"), set[tuple[int, int]]()
        self._rng = np.random.default_rng([seed, 0])

    def next_noise(self) -> FloatArray:
        """Return the noise factors of the next step, for present and absent workers, ``(size,)``.

        Every call draws the same number of random values, so that all policies see the same.
        """
        normal = self._rng.standard_normal(len(self._spike_rate))
        spiked = self._rng.random(len(self._spike_rate)) < self._spike_rate
        factor = np.exp(self._noise.next_logs(normal))
        return np.asarray(factor * np.where(spiked, self._spike_factor, 1.0))

    def new_share_s(self, workers: IntArray, shares: IntArray) -> FloatArray:
        """Return the additional seconds of a step for shares that are new to workers.

        The shares then count as known.
        """
        added_s = self._new_share_s[workers]
        if added_s.any():
            now = list(zip(workers.tolist(), shares.tolist(), strict=True))
            added_s[[pair in self._had for pair in now]] = 0.0
            self._had.update(now)
        return added_s


class StepNoise:
    """The logarithms of the noise of ``W`` workers, step by step, without spikes.

    Every step draws the same number of values. What goes beyond independent normal noise has its
    own generator, so that all other scenarios keep their noise.
    """

    def __init__(self, groups: list[WorkerGroup], seed: int) -> None:
        def column(name: str) -> FloatArray:
            return np.array([getattr(group, name) for group in groups], dtype=np.float64)

        self._size, self._common = column("noise"), column("noise_common")
        self._kept = column("noise_correlation")
        half = np.array([np.inf if g.noise_tail is None else g.noise_tail / 2 for g in groups])
        self._heavy = np.flatnonzero(np.isfinite(half))
        self._half = half[self._heavy]
        self._kinds, self._kind = np.unique(self._half, return_inverse=True)
        self._rng = np.random.default_rng([seed, 2])
        self._last: FloatArray | None = None

    def next_logs(self, normal: FloatArray) -> FloatArray:
        """Return the next logarithms, given a standard normal value of each worker, ``(W,)``."""
        new = normal
        if len(self._heavy):
            new = normal.copy()
            new[self._heavy] *= self._tails(self._half)
        if self._common.any():
            common = np.full_like(new, self._rng.standard_normal())
            if len(self._heavy):
                common[self._heavy] *= self._tails(self._kinds)[self._kind]
            new = np.sqrt(1.0 - self._common) * new + np.sqrt(self._common) * common
        if self._last is not None:
            new = self._kept * self._last + np.sqrt(1.0 - self._kept**2) * new
        if self._kept.any():
            self._last = new
        logs = self._size * new
        if len(self._heavy):  # as far as a spike may go; the tails have no end
            logs[self._heavy] = np.clip(logs[self._heavy], -_LONGEST_LOG, _LONGEST_LOG)
        return logs

    def _tails(self, half: FloatArray) -> FloatArray:
        """Return factors that make a normal value Student's t, scaled to the same deviation.

        ``half`` is half the degrees of freedom of each, above 1.
        """
        return np.asarray(np.sqrt((half - 1.0) / self._rng.standard_gamma(half)))


def _named(groups: list[WorkerGroup]) -> list[Worker]:
    counts: dict[str, int] = {}
    workers = []
    for group in groups:
        number = counts[group.name] = counts.get(group.name, -1) + 1
        workers.append(
            Worker(
                f"{group.name}/{number}",
                min_share=group.min_share,
                max_share=group.max_share,
                cores=group.cores,
                flops_per_s=group.flops_per_s,
                quantum=group.quantum,
            )
        )
    return workers


Mask = npt.NDArray[np.bool_]


class Bands:
    """The bands of ``W`` workers; see `ToleranceBand` for the rule."""

    def __init__(self, workers: int) -> None:
        self._share = np.zeros(workers, dtype=np.int64)
        self._expected_s, self._part = np.zeros(workers), np.zeros(workers)
        self._strikes = np.zeros(workers, dtype=np.int64)
        self._asked = np.zeros(workers, dtype=np.bool_)
        self._slow_s, self._slower_s = np.zeros(workers), np.zeros(workers)
        self._slower, self._faster = np.zeros(workers), np.zeros(workers)
        self.broke: list[Mask] = []
        """For each step since the bands were set, the workers whose times began to leave them."""

    def expect(self, expect: Expect, shares: Shares) -> None:
        self._share = as_array(shares)
        self._expected_s, self._part = np.array(expect.expected_s), np.array(expect.band)
        self._strikes[:], self._asked[:] = 0, False
        for sums in (self._slow_s, self._slower_s, self._slower, self._faster):
            sums[:] = 0.0
        self.broke.clear()

    def step(self, shares: IntArray, busy_s: npt.NDArray[np.float64]) -> Mask:
        """Check a step; return the workers that request an exchange because of it."""
        judged = ~self._asked & (self._expected_s > 0) & (shares == self._share)
        asks = np.zeros_like(judged)
        at, one_s = np.flatnonzero(judged), busy_s[judged]
        off = (one_s / self._expected_s[at] - 1.0) / self._part[at]
        before = self._strikes[at]
        self._strikes[at] = np.where(off > 1.0, before + 1, 0)
        self._slow_s[at] = np.where(off > 1.0, self._slow_s[at] + one_s, 0.0)
        part = np.clip(off, -MOST_OFF, MOST_OFF)
        self._slower[at] = np.clip(self._slower[at] + part - TOLERATED, 0.0, ASKS_AT)
        self._faster[at] = np.clip(self._faster[at] - part - TOLERATED, 0.0, ASKS_AT)
        self._slower_s[at] = np.where(self._slower[at] > 0, self._slower_s[at] + one_s, 0.0)
        asks[at] = (
            (off < -1.0)
            | ((self._strikes[at] > 1) & (self._slow_s[at] >= HICCUP_S))
            | ((self._slower[at] == ASKS_AT) & (self._slower_s[at] >= HICCUP_S))
            | (self._faster[at] == ASKS_AT)
        )
        broke = np.zeros_like(judged)
        broke[at] = (asks[at] | (self._strikes[at] > 0)) & (before == 0)
        self.broke.append(broke)
        self._asked |= asks
        return np.asarray(asks)


class OwnNotes:
    """Keeps the updates of ``W`` workers until the next exchange, and finds requests for one."""

    def __init__(self, workers: int) -> None:
        self._made = [0] * workers
        self._bands = [ToleranceBand() for _ in range(workers)]
        self._seen: list[list[Observation]] = [[] for _ in range(workers)]

    def expect(self, expect: Expect, shares: Shares) -> None:
        columns = zip(shares, expect.expected_s, expect.band, strict=True)
        self._bands = [
            ToleranceBand(share, expected_s, part) for share, expected_s, part in columns
        ]

    def add(self, worker: int, share: int, busy_s: float, wait_s: float) -> bool:
        """Keep an update; return whether the worker requests an exchange because of it."""
        before = self._bands[worker]
        after = self._bands[worker] = before.step(share, busy_s)
        seen, step = self._seen[worker], self._made[worker]
        self._made[worker] += 1
        breaks = (after.strikes > 0 or after.asked) and before.strikes == 0 and not before.asked
        if seen and seen[-1].share == share and not breaks:
            last = seen[-1]
            seen[-1] = replace(last, busy_s=(*last.busy_s, busy_s), wait_s=(*last.wait_s, wait_s))
        else:
            seen.append(Observation(worker, share, step, (busy_s,), (wait_s,)))
        return after.asked and not before.asked

    def take(self, cpu_load: FloatArray) -> Measurements:
        """Return all updates as observations, with the current loads of machines; forget them."""
        measured = Measurements.of(
            replace(seen, cpu_load=float(cpu_load[worker]))
            for worker, all_seen in enumerate(self._seen)
            for seen in all_seen
        )
        self._seen = [[] for _ in self._seen]
        return measured


class Notes:
    """Keeps the steps of ``W`` workers until the next exchange."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: list[int] = []
        self._shares: list[IntArray] = []
        self._busy_s: list[FloatArray] = []
        self._wait_s: list[FloatArray] = []

    def add(self, step: int, shares: IntArray, busy_s: FloatArray, wait_s: FloatArray) -> None:
        """Keep one step; all arrays have shape ``(W,)``."""
        self._steps.append(step)
        self._shares.append(shares)
        self._busy_s.append(busy_s)
        self._wait_s.append(wait_s)

    def take(
        self, breaks: list[npt.NDArray[np.bool_]], cpu_load: FloatArray | None = None
    ) -> Measurements:
        """Return all steps as observations, and forget them.

        ``breaks`` says for each of the latest steps for which workers it begins an observation.
        ``cpu_load`` is the current load of each worker's machine, ``(W,)``.
        """
        shares, busy_s = np.array(self._shares).T, np.array(self._busy_s).T  # (W, steps)
        workers, steps = shares.shape
        begins = np.zeros_like(shares, dtype=np.bool_)
        begins[:, 0] = True
        begins[:, 1:] = shares[:, 1:] != shares[:, :-1]
        known = breaks[-steps:]
        if known:
            begins[:, steps - len(known) :] |= np.array(known).T
        first = np.flatnonzero(begins)
        loads = np.full((2, len(first)), np.nan)
        if cpu_load is not None:
            loads[0] = cpu_load[first // steps]
        measured = Measurements(
            worker=first // steps,
            share=shares.ravel()[first],
            first_step=np.array(self._steps)[first % steps],
            steps=np.diff(np.append(first, workers * steps)),
            busy_s=busy_s.ravel(),
            wait_s=np.array(self._wait_s).T.ravel(),
            loads=loads,
        )
        self._steps, self._shares, self._busy_s, self._wait_s = [], [], [], []
        return measured
