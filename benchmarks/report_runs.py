"""Traces of synthetic runs: the real controller on workers with computed times.

The benchmark, the tests and the pictures of the report use them. The straggler, its steps and its
speed are known, so that tests can check the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp
from pathlib import Path

import numpy as np
from benchmarks.virtual_run import VirtualRun

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.trace.codec import TraceWriter

STARTED_UNIX_S = 1.8e9
EVALUATION_S = 1.5


@dataclass(frozen=True)
class Made:
    """A synthetic run.

    Args:
        steps: Number of steps.
        policy: Policy that decides.
        speeds: Speeds of the workers. A worker of speed 1 takes 1 ms per sample.
        changes: Pairs of a step and the speeds from that step on.
        batch: Samples per step.
        fixed_s: Fixed time of every step of every worker.
        communication_s: Communication time of every step.
        noise: Relative standard deviation of times.
        spikes: Pairs (step, worker) that take eight times as long.
        evaluated: Steps between evaluations of `EVALUATION_S`; 0 for no evaluation.
        names: Names of the workers.
        header: Further fields of the trace header.
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
    """Append the trace of a run to a file and return the path.

    Args:
        run: Synthetic run.
        path: Trace file.
        seed: Seed of the noise.
        first: Number of the first step, for a training that continues.
        started_unix_s: Start time in the header.
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
        _write(run, writer, np.random.default_rng(seed), first)
    return path


def _write(run: Made, writer: TraceWriter, random: np.random.Generator, first: int) -> None:
    names = run.names or tuple(f"node{n // 2}/{n}" for n in range(len(run.speeds)))
    times = partial(_times_s, run, random)
    virtual = VirtualRun(
        *(writer, run.policy, run.batch, names, times, run.communication_s), fresh=True
    )
    virtual.begin()
    writer.record("pass", at_s=0.0, step=0, epochs=0.0, samples=run.batch * 400)
    while (step := virtual.step) < run.steps:
        due = step - step % run.evaluated + run.evaluated if run.evaluated else run.steps
        virtual.window(min(virtual.after, run.steps - step, due - step))
        if run.evaluated and virtual.step == due:
            virtual.pause(EVALUATION_S)
            _evaluate(writer, virtual.clock_s, first + due)
    writer.record("ended", at_s=round(virtual.clock_s, 6), summary={"step": run.steps})


def _times_s(run: Made, random: np.random.Generator, first: int, shares: IntArray) -> FloatArray:
    speeds = np.array([_speeds(run, first + row) for row in range(len(shares))])
    scatter = 1.0 + run.noise * np.abs(random.standard_normal(shares.shape))
    busy_s = (run.fixed_s + 1e-3 * shares) / speeds * scatter
    for step, worker in run.spikes:
        if first <= step < first + len(shares):
            busy_s[step - first, worker] *= 8.0
    return np.asarray(busy_s)


def _evaluate(writer: TraceWriter, at_s: float, step: int) -> None:
    epochs = step / 400
    for name, value in (("loss", 2.3 * exp(-epochs) + 0.1), ("accuracy", 1.0 - exp(-epochs))):
        found = {"step": step, "epochs": epochs, "name": name, "value": value}
        writer.record("metric", at_s=round(at_s, 6), **found)


def _speeds(run: Made, step: int) -> Sequence[float]:
    found = run.speeds
    for begin, speeds in run.changes:
        found = speeds if step >= begin else found
    return found
