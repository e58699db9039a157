"""Traces of runs that never took place: the real control on workers whose times are made up.

For the report's benchmark, its tests and its pictures: what is slow, from which step on and by how
much is known, so that what the page says of it can be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp
from pathlib import Path

import numpy as np

from evenstride.core.control import advance
from evenstride.core.events import Event, ExchangeAfter, Exchanged, FleetFormed, SetShares
from evenstride.core.fleet import FloatArray, Worker
from evenstride.core.observation import Measured, Observation
from evenstride.core.policies import policy_from_spec
from evenstride.core.schedule import Schedule
from evenstride.core.state import Control
from evenstride.trace.write import TraceWriter

STARTED_UNIX_S = 1.8e9
EVALUATION_S = 1.5


@dataclass(frozen=True)
class Made:
    """A run to make up.

    Args:
        steps: of it.
        policy: that decides.
        speeds: of the workers; the fastest takes a millisecond a sample at 1.
        changes: from a step on, other speeds.
        batch: samples per step.
        fixed_s: of every step of every worker.
        communication_s: of every step.
        noise: standard deviation of a time, as a part of it.
        spikes: (step, worker) that takes eight times as long, once.
        evaluated: after so many steps there is an evaluation of `EVALUATION_S`.
        names: of the workers.
        header: more facts.
    """

    steps: int
    policy: str = "adaptive"
    speeds: tuple[float, ...] = (1.0, 0.5, 0.3)
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    batch: int = 256
    fixed_s: float = 0.01
    communication_s: float = 0.006
    noise: float = 0.03
    spikes: tuple[tuple[int, int], ...] = ()
    evaluated: int = 0
    names: tuple[str, ...] = ()
    header: dict[str, object] = field(default_factory=dict)


def make(
    run: Made, path: Path, *, seed: int = 0, first: int = 0, started_unix_s: float = STARTED_UNIX_S
) -> Path:
    """Write the trace of a run, behind what the file may hold already; return its path.

    Args:
        run: to make up.
        path: the file.
        seed: of the noise.
        first: number of its first step, of a training that goes on.
        started_unix_s: that its header tells.
    """
    header = {
        "policy": run.policy,
        "global_batch": run.batch,
        "sync": "bsp",
        "world_size": len(run.speeds),
        "evenstride": "0.1.0",
        "started_unix_s": started_unix_s,
        **run.header,
    }
    with TraceWriter(path, header) as writer:
        _Making(run, writer, np.random.default_rng(seed), first).tell()
    return path


class _Making:
    def __init__(
        self, run: Made, writer: TraceWriter, random: np.random.Generator, first: int
    ) -> None:
        self._run, self._writer, self._random = run, writer, random
        self._control = Control(policy_from_spec(run.policy))
        self._schedule = Schedule(())
        self._at_s, self._first, self._after = 0.0, first, 1
        self._outside_s = 0.0

    def tell(self) -> None:
        run, step = self._run, 0
        names = run.names or tuple(f"node{n // 2}/{n}" for n in range(len(run.speeds)))
        self._put(FleetFormed(0, 0, run.batch, tuple(map(Worker, names))))
        self._writer.record("pass", at_s=self._at_s, step=0, epochs=0.0, samples=run.batch * 400)
        while step < run.steps:
            due = step - step % run.evaluated + run.evaluated if run.evaluated else run.steps
            seen = self._train(step, until := min(step + self._after, run.steps, due))
            step = until
            self._put(Exchanged(step, step + 1, Measured.of(seen)))
            if run.evaluated and step == due:
                self._evaluate(step)
        self._writer.record("ended", at_s=round(self._at_s, 6), summary={"step": run.steps})

    def _put(self, event: Event) -> None:
        self._control, instructions = advance(self._control, event)
        self._writer.event(self._at_s, event, instructions)
        for one in instructions:
            if isinstance(one, SetShares):
                self._schedule = self._schedule.decided(one.effective, one.shares)
            elif isinstance(one, ExchangeAfter):
                self._after = one.steps

    def _train(self, first: int, until: int) -> list[Observation]:
        run, count = self._run, until - first
        shares = np.array([self._schedule.shares_at(step) for step in range(first, until)])
        busy_s = self._busy_s(first, shares)
        wait_s = busy_s.max(axis=1)[:, np.newaxis] - busy_s + run.communication_s
        self._at_s += float(busy_s.max(axis=1).sum()) + count * run.communication_s
        outside_s, self._outside_s = self._outside_s, 0.0
        edges = [0, *(np.flatnonzero((np.diff(shares, axis=0) != 0).any(axis=1)) + 1), count]
        edges = sorted({*edges, 1} if first == 0 and count > 1 else {*edges})
        return [
            Observation(
                worker=worker,
                share=int(shares[begin, worker]),
                first_step=first + int(begin),
                busy_s=tuple(np.round(busy_s[begin:end, worker], 7).tolist()),
                wait_s=tuple(np.round(wait_s[begin:end, worker], 7).tolist()),
                outside_s=outside_s if begin == 0 else 0.0,
                modelled=first + int(begin) > 0,
            )
            for worker in range(len(run.speeds))
            for begin, end in pairwise(edges)
        ]

    def _busy_s(self, first: int, shares: FloatArray) -> FloatArray:
        run = self._run
        speeds = np.array([_speeds(run, first + row) for row in range(len(shares))])
        scatter = 1.0 + run.noise * np.abs(self._random.standard_normal(shares.shape))
        busy_s = (run.fixed_s + 1e-3 * shares) / speeds * scatter
        for step, worker in run.spikes:
            if first <= step < first + len(shares):
                busy_s[step - first, worker] *= 8.0
        return np.asarray(busy_s)

    def _evaluate(self, step: int) -> None:
        self._at_s += EVALUATION_S
        self._outside_s = EVALUATION_S
        epochs = (self._first + step) / 400
        for name, value in (("loss", 2.3 * exp(-epochs) + 0.1), ("accuracy", 1.0 - exp(-epochs))):
            found = {"step": self._first + step, "epochs": epochs, "name": name, "value": value}
            self._writer.record("metric", at_s=round(self._at_s, 6), **found)


def _speeds(run: Made, step: int) -> Sequence[float]:
    found = run.speeds
    for begin, speeds in run.changes:
        found = speeds if step >= begin else found
    return found
