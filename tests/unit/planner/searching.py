"""Machines whose true steps are known, and what probes of them tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstride.planner.online_forecast import Configuration, Probe
from evenstride.planner.workload.step_time import Curve, Workers, exact_step
from evenstride.planner.workload.workload_profile import Noise, Point
from evenstride.sim.engine.network import Ring


@dataclass(frozen=True, slots=True)
class Truth:
    """Workers with lines of their own, a ring, and a time that every step takes in addition."""

    per_sample_s: Sequence[float]
    fixed_samples: float = 20.0  # that a worker could train in its fixed time
    latency_s: float = 0.0001
    gradient_bytes: float = 4e5
    beside: float = 1.0
    noise: Noise | None = None

    @property
    def ring(self) -> Ring:
        return Ring(self.latency_s, 1e8, self.gradient_bytes)

    def step_s(self, choice: Configuration) -> float:
        return self.beside * self._exact(choice)[0]

    def _exact(self, choice: Configuration) -> tuple[float, tuple[int, ...]]:
        fleet = [
            Workers(Curve(self.fixed_samples * each, each, 0.0), 1) for each in self.per_sample_s
        ]
        step = exact_step(fleet[: choice.workers], choice.batch, self.ring)
        return step.time_s, step.shares

    def probe(self, choice: Configuration, steps: int = 40) -> Probe:
        """Return what a probe tells: each worker at its share, and at an equal split before."""
        _, shares = self._exact(choice)
        points = tuple(
            tuple(
                Point(samples=b, step_s=each * (self.fixed_samples + b), scatter=0.01, steps=steps)
                for b in sorted({share, max(choice.batch // choice.workers, 1)})
            )
            for share, each in zip(shares, self.per_sample_s, strict=False)
        )
        communication_s = self.ring.all_reduce_s(choice.workers) if choice.workers > 1 else None
        noise = self.noise if choice.workers > 1 else None
        return Probe(choice, steps, self.step_s(choice), points, communication_s, noise)
