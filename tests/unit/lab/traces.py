"""Traces written by hand, as a run under the lab would leave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evenstride.core.control.events import Exchanged, FleetFormed, KeepShares, SetShares
from evenstride.core.fleet import Shares, Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.trace.codec import TraceWriter


def write_run(
    path: Path,
    policy: str,
    steps_s: Sequence[float],
    splits: Sequence[Shares],
    wait_s: float = 0.0,
    sync: str = "bsp",
    busy_s: Callable[[int, int], float] | None = None,
) -> None:
    """Write the trace of a run with the step times ``steps_s``.

    The run opens with the first of ``splits`` and takes on the others one exchange after another.
    Its first 40 steps have the first split, and all others the last one. It ends in order, in the
    mode ``sync``. ``busy_s`` returns the busy time of a worker at a share. Without it, the leader
    waits ``wait_s`` in each step, and the other worker half of the rest besides.
    """
    workers = tuple(Worker(f"here-{rank}") for rank in range(len(splits[0])))
    opening, *changes = splits
    with TraceWriter(path, {"policy": policy}) as trace:
        trace.event(
            0.0, FleetFormed(0, 0, sum(opening), workers), (SetShares(0, opening, "opening"),)
        )
        for first in range(0, len(steps_s), 10):
            some = steps_s[first : first + 10]
            seen = []
            for worker, share in enumerate(splits[0] if first < 40 else splits[-1]):
                works_s = [
                    busy_s(worker, share) if busy_s else (s - wait_s) / (1 + worker) for s in some
                ]
                waits_s = [s - w for s, w in zip(some, works_s, strict=True)]
                seen.append(Observation(worker, share, first, tuple(works_s), tuple(waits_s)))
            step = first + len(some)
            answer = (
                SetShares(step, changes.pop(0), "better") if changes else KeepShares("good as is")
            )
            trace.event(1.0, Exchanged(step, step, Measurements.of(seen)), (answer,))
        trace.record("ended", at_s=1.0, summary={"sync": sync, "staleness": None})


def write_calibration(
    path: Path, times_s: Mapping[int, Sequence[float]], unmodelled_s: float | None = None
) -> None:
    """Write the trace of a lone worker that took ``times_s`` at each size.

    Args:
        path: of the trace.
        times_s: of the steps at each size.
        unmodelled_s: time of a first step at each size that says nothing about speed.
    """
    with TraceWriter(path, {"policy": "uniform"}) as trace:
        largest = max(times_s, default=1)
        formed = FleetFormed(0, 0, largest, (Worker("here-0"),))
        trace.event(0.0, formed, (SetShares(0, (largest,), "opening"),))
        step = 0
        for size, steps_s in times_s.items():
            seen = [Observation(0, size, step, tuple(steps_s), (0.0,) * len(steps_s))]
            if unmodelled_s is not None:
                cold = Observation(0, size, step, (unmodelled_s,), (0.0,), modelled=False)
                seen.insert(0, cold)
            step += len(steps_s)
            trace.event(1.0, Exchanged(step, step, Measurements.of(seen)), (KeepShares("alone"),))
