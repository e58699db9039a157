"""Virtual workers: their true time curves, and the noise that lengthens their steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray, Worker
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
        """Return each worker's time in seconds at its share; both of shape ``(W,)``."""
        above = np.maximum(shares - self.knee, 0.0)
        linear = self.fixed_s + self.per_sample_s * (shares + (self.beyond - 1.0) * above)
        return np.maximum(self.floor_s, linear) / self.speed

    def capacity(self, deadline_s: float) -> IntArray:
        """Return per worker the largest share that ends by the deadline (0 if none does)."""
        plain = (deadline_s * self.speed - self.fixed_s) / self.per_sample_s
        below = np.minimum(plain, self.knee)
        bent = below + (plain - below) / self.beyond
        share = np.clip(np.floor(bent), 0, 2**53).astype(np.int64)
        share += self.at(share + 1) <= deadline_s
        share -= (share > 0) & (self.at(share) > deadline_s)
        return np.where(self.floor_s / self.speed > deadline_s, 0, share)

    def at_speed(self, speed: FloatArray) -> TrueTimes:
        """Return the curves at another speed."""
        return TrueTimes(
            self.fixed_s, self.per_sample_s, self.floor_s, self.knee, self.beyond, speed
        )

    def of(self, workers: IntArray) -> TrueTimes:
        """Return the curves of some of the workers."""
        return TrueTimes(*(getattr(self, name)[workers] for name in self.__slots__))


class Cluster:
    """All the workers that a scenario ever has."""

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
        """Return what lengthens the next step of each worker, there or not, ``(size,)``.

        Every call draws the same number of random values, so that all policies see the same.
        """
        normal = self._rng.standard_normal(len(self._noise))
        spiked = self._rng.random(len(self._noise)) < self._spike_rate
        return np.asarray(np.exp(self._noise * normal) * np.where(spiked, self._spike_factor, 1.0))

    def new_share_s(self, workers: IntArray, shares: IntArray) -> FloatArray:
        """Return the seconds that a step takes longer because its shares are new to workers.

        Args:
            workers: the numbers of those who train it.
            shares: theirs in the step, which then are no longer new.
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
