"""Virtual workers: their true time curves, the noise of their steps, and their reports.

Workers in lockstep report the same steps; others report their own updates, each with its own
count. `Bands` is `ToleranceBand` for all workers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenstride.core.control.events import Expect
from evenstride.core.control.schedule import HICCUP_S, ToleranceBand
from evenstride.core.fleet import FloatArray, IntArray, Shares, Worker, as_array
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.sim.scenario.scenario_model import Scenario, WorkerGroup


@dataclass(frozen=True, slots=True, eq=False)
class TrueTimes:
    """The true mean curves of ``W`` workers at one moment; a `StepTimes`.

    ``t(b) = max(floor, fixed + c b + (beyond - 1) c max(0, b - knee)) / speed``, where ``c`` is
    the time per sample: above its knee a worker is saturated, and every sample costs more.
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray
    knee: FloatArray
    beyond: FloatArray
    speed: FloatArray

    def at(self, shares: IntArray) -> FloatArray:
        above = np.maximum(shares - self.knee, 0.0)
        linear = self.fixed_s + self.per_sample_s * (shares + (self.beyond - 1.0) * above)
        return np.maximum(self.floor_s, linear) / self.speed

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share that ends by the deadline (0 if no share does)."""
        plain = (deadline_s * self.speed - self.fixed_s) / self.per_sample_s
        below = np.minimum(plain, self.knee)
        bent = below + (plain - below) / self.beyond
        share = np.clip(np.floor(bent), 0, 2**53).astype(np.int64)
        share += self.at(share + 1) <= deadline_s
        share -= (share > 0) & (self.at(share) > deadline_s)
        return np.where(self.floor_s / self.speed > deadline_s, 0, share)

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
        self.usual = TrueTimes(
            column("fixed_s"),
            1.0 / column("samples_per_s"),
            column("floor_s"),
            np.array(knee, dtype=np.float64),
            column("beyond"),
            np.ones(size),
        )
        self.workers = tuple(_named(groups))
        self._noise, self._spike_rate = column("noise"), column("spike_rate")
        self._spike_factor = column("spike_factor")
        self.handling_s = column("handling_s")
        self._new_share_s, self._had = column("new_share_s"), set[tuple[int, int]]()
        self._rng = np.random.default_rng([seed, 0])

    def next_noise(self) -> FloatArray:
        """Return the noise factors of the next step, for present and absent workers, ``(size,)``.

        Every call draws the same number of random values, so that all policies see the same.
        """
        normal = self._rng.standard_normal(len(self._noise))
        spiked = self._rng.random(len(self._noise)) < self._spike_rate
        return np.asarray(np.exp(self._noise * normal) * np.where(spiked, self._spike_factor, 1.0))

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
        self._slow_s = np.zeros(workers)
        self._asked = np.zeros(workers, dtype=np.bool_)
        self.broke: list[Mask] = []
        """For each step since the bands were set, the workers whose times began to leave them."""

    def expect(self, expect: Expect, shares: Shares) -> None:
        self._share = as_array(shares)
        self._expected_s, self._part = np.array(expect.expected_s), np.array(expect.band)
        self._strikes[:], self._slow_s[:], self._asked[:] = 0, 0.0, False
        self.broke.clear()

    def step(self, shares: IntArray, busy_s: npt.NDArray[np.float64]) -> Mask:
        """Check a step; return the workers that request an exchange because of it."""
        judged = ~self._asked & (self._expected_s > 0) & (shares == self._share)
        fast = judged & (busy_s < self._expected_s * (1 - self._part))
        slow = judged & (busy_s > self._expected_s * (1 + self._part))
        self._slow_s = np.where(slow, self._slow_s + busy_s, np.where(judged, 0.0, self._slow_s))
        asks = fast | (slow & (self._strikes >= 1) & (self._slow_s >= HICCUP_S))
        self.broke.append((fast | slow) & (self._strikes == 0))
        self._strikes = np.where(slow, self._strikes + 1, np.where(judged, 0, self._strikes))
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
