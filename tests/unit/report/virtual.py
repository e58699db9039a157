"""Runs of workers whose speed in every step is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import virtual_run

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.time_model.observation import PeakMemory
from evenstride.trace.codec import TraceWriter

FIXED_S, PER_SAMPLE_S, COMMUNICATION_S = 0.002, 0.001, 0.003
SELDOM = 8  # steps between exchanges, at most: real workers ask when times leave their band


class VirtualRun(virtual_run.VirtualRun):
    """Writes the trace of a run whose workers have given speeds.

    Args:
        path: of the trace.
        speed: gives the workers' speeds in a step.
        workers: how many there are.
        policy: by its specification.
        batch: samples of a step.
        noise: standard deviation of a step's time, as a part of it.
        names: gives each worker's.
        header: more facts.
    """

    def __init__(
        self,
        path: Path,
        speed: Callable[[int], tuple[float, ...]],
        workers: int = 3,
        policy: str = "adaptive",
        batch: int = 96,
        noise: float = 0.0,
        names: Callable[[int], str] = "host/{}".format,
        header: dict[str, Any] | None = None,
    ) -> None:
        facts = {"policy": policy, "global_batch": batch, "world_size": workers, "sync": "bsp"}
        super().__init__(
            TraceWriter(path, {**facts, "started_unix_s": 1.7e9, **(header or {})}),
            *(policy, batch, tuple(map(names, range(workers))), self._times_s, COMMUNICATION_S),
            held=tuple(PeakMemory(rank, 32, 1 << 30, 4 << 30) for rank in range(workers)),
            begins_s=0.5,
        )
        self._speed, self._noise = speed, noise
        self._rng = np.random.default_rng(0)
        self.busy_s: list[FloatArray] = []

    def run(self, steps: int, *, apart_s: float = 0.0) -> None:
        """Train some steps; before the first, something else takes some seconds."""
        self.pause(apart_s)
        last = self.step + steps
        while self.step < last:
            self.busy_s += list(self.window(min(self.after, SELDOM, last - self.step)))

    def end(self, **summary: Any) -> None:
        """Write the last record."""
        self.writer.record("ended", at_s=round(self.clock_s, 6), summary=summary)
        self.writer.close()

    def _times_s(self, first: int, shares: IntArray) -> FloatArray:
        speeds = np.array([self._speed(first + row) for row in range(len(shares))])
        scatter = np.exp(self._noise * self._rng.standard_normal(shares.shape))
        return np.asarray((FIXED_S + PER_SAMPLE_S * shares) / speeds * scatter)
