"""Runs that never were: workers of known speed under the real controller, and the trace of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenstride.core.caps import Held
from evenstride.core.control import advance
from evenstride.core.events import (
    Event,
    ExchangeAfter,
    Exchanged,
    FleetFormed,
    Instruction,
    SetShares,
)
from evenstride.core.fleet import Shares, Worker
from evenstride.core.observation import Measured, Observation
from evenstride.core.policies import policy_from_spec
from evenstride.core.state import Control
from evenstride.trace.write import TraceWriter

FIXED_S, PER_SAMPLE_S, COMMUNICATION_S = 0.002, 0.001, 0.003
SELDOM = 8  # steps between exchanges, at most


class VirtualRun:
    """Writes the trace of a run whose workers have given speeds.

    Args:
        path: of the trace.
        speed: gives the workers' speeds in a step.
        workers: how many there are.
        policy: by its specification.
        batch: samples of a step.
        noise: standard deviation of a step's time, as a part of it.
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
        self.writer = TraceWriter(path, {**facts, "started_unix_s": 1.7e9, **(header or {})})
        self._speed, self._noise, self._batch = speed, noise, batch
        self._rng = np.random.default_rng(0)
        self._control = Control(policy_from_spec(policy))
        self._names = tuple(map(names, range(workers)))
        self.step, self.clock_s = 0, 0.5
        self._shares: list[tuple[int, Shares]] = []
        self.busy_s: list[np.ndarray] = []
        self._told, self._due = 0, 1

    def begin(self, generation: int = 0) -> None:
        """Form the group of all workers."""
        workers = tuple(Worker(name) for name in self._names)
        self._happen(FleetFormed(generation, self.step, self._batch, workers))

    def run(self, steps: int, *, apart_s: float = 0.0) -> None:
        """Train some steps; before the first, something else takes some seconds."""
        last = self.step + steps
        self.clock_s += apart_s
        self._apart_s = apart_s
        while self.step < last:
            self._train()
            self._due -= 1
            if self._due <= 0 or self.step == last:
                self._exchange()

    def end(self, **summary: Any) -> None:
        """Write the last record."""
        self.writer.record("ended", at_s=round(self.clock_s, 6), summary=summary)
        self.writer.close()

    def shares_at(self, step: int) -> Shares:
        """Return the shares that hold in a step."""
        return [shares for first, shares in self._shares if first <= step][-1]

    def _train(self) -> None:
        shares = np.array(self.shares_at(self.step))
        busy_s = (FIXED_S + PER_SAMPLE_S * shares) / np.array(self._speed(self.step))
        busy_s *= np.exp(self._noise * self._rng.standard_normal(len(busy_s)))
        self.busy_s.append(busy_s)
        self.clock_s += float(busy_s.max()) + COMMUNICATION_S
        self.step += 1

    def _exchange(self) -> None:
        told = [one for rank in range(len(self._names)) for one in self._observed(rank)]
        self._told, self._apart_s = self.step, 0.0
        held = tuple(Held(rank, 32, 1 << 30, 4 << 30) for rank in range(len(self._names)))
        self._happen(Exchanged(self.step, self.step + 1, Measured.of(told), held))

    def _observed(self, rank: int) -> list[Observation]:
        found, first = [], self._told
        for step in range(self._told + 1, self.step + 1):
            if step == self.step or self.shares_at(step) != self.shares_at(first):
                found.append(self._observation(rank, first, step))
                first = step
        return found

    def _observation(self, rank: int, first: int, stop: int) -> Observation:
        busy_s = np.array(self.busy_s[first:stop])
        waits_s = busy_s.max(axis=1) - busy_s[:, rank] + COMMUNICATION_S
        own_s = tuple(np.round(busy_s[:, rank], 7).tolist())
        waited_s = tuple(np.round(waits_s, 7).tolist())
        apart_s = self._apart_s if first == self._told else 0.0
        share = self.shares_at(first)[rank]
        return Observation(rank, share, first, own_s, waited_s, outside_s=apart_s)

    def _happen(self, event: Event) -> None:
        self._control, told = advance(self._control, event)
        self.writer.event(self.clock_s, event, told)
        for instruction in told:
            self._follow(instruction)

    def _follow(self, instruction: Instruction) -> None:
        if isinstance(instruction, SetShares):
            self._shares.append((instruction.effective, instruction.shares))
        elif isinstance(instruction, ExchangeAfter):
            # Real workers ask for an exchange when their times leave their band.
            self._due = min(instruction.steps, SELDOM)
