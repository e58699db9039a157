"""Runs as they are recorded, of machines whose steps are skewed, wander, and are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evenstride.core.control.events import Exchanged, FleetFormed, KeepShares, SetShares
from evenstride.core.fleet import FloatArray, Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.runtime.timing.recorder import stretches
from evenstride.runtime.timing.step_timer import StepRecord
from evenstride.trace.codec import TraceWriter

SLOW = 3.0  # times a usual step, from which on a step begins an observation of its own


def recorded(
    folder: Path,
    busy_s: FloatArray,
    shares: Sequence[int],
    *,
    communication_s: FloatArray | float = 0.0,
    outside_s: float = 0.0,
    steps_each: int = 100,
    evaluation_s: float = 0.0,
) -> float:
    """Write a run's trace, and return how many seconds it took.

    As the leader does it: each step's slowest worker waits for communication only, the others for
    it as well; what begins a pass is not modelled; slow steps begin an observation.

    Args:
        folder: for it.
        busy_s: of each worker's steps, ``(workers, steps)``.
        shares: of the workers.
        communication_s: of each step.
        outside_s: between all steps, beyond what is usual.
        steps_each: of a pass.
        evaluation_s: after each pass.
    """
    workers, steps = busy_s.shape
    whole_s = busy_s.max(axis=0) + communication_s
    begun_s = np.concatenate([[0.0], np.cumsum(whole_s + outside_s)])
    begun_s += np.arange(steps + 1) // steps_each * evaluation_s
    facts = {"policy": "adaptive", "evenstride": "0.1.0", "torch": "2.13.0", "world_size": workers}
    facts |= {"global_batch": sum(shares), "started_unix_s": 1.77e9}
    with TraceWriter(folder / "trace.jsonl", facts) as trace:
        fleet = tuple(Worker(f"m{rank}/{rank}") for rank in range(workers))
        formed = FleetFormed(0, 0, sum(shares), fleet)
        trace.event(0.0, formed, (SetShares(0, tuple(shares), "opening"),))
        model = {"parameters": 1_000_000, "gradient_bytes": 4_000_000, "digest": "abc"}
        trace.record("workload", **model, samples=steps_each * sum(shares), device="")
        for first in range(0, steps, steps_each):
            at = {"at_s": float(begun_s[first]), "samples": steps_each * sum(shares)}
            trace.record("pass", **at, step=first, epochs=first / steps_each)
            last = min(first + steps_each, steps)
            seen = [
                observation
                for rank in range(workers)
                for observation in _reported(
                    rank, shares[rank], busy_s, whole_s, outside_s, first, last
                )
            ]
            event = Exchanged(last, last, Measurements.of(seen))
            trace.event(float(begun_s[last]), event, (KeepShares("good as is"),))
    return float(begun_s[-1])


def _reported(
    rank: int,
    share: int,
    busy_s: FloatArray,
    whole_s: FloatArray,
    outside_s: float,
    first: int,
    last: int,
) -> list[Observation]:
    usual_s = float(np.median(busy_s[rank]))
    records = [
        StepRecord(
            *(step, share, float(busy_s[rank, step]), float(whole_s[step] - busy_s[rank, step])),
            *(0.0, outside_s, 0.0, step != first),
        )
        for step in range(first, last)
    ]
    slow = {n for n, record in enumerate(records) if record.busy_s > SLOW * usual_s}
    found = []
    for run in stretches(records, slow):
        some = records[run]
        found.append(
            Observation(
                *(rank, share, some[0].step),
                tuple(one.busy_s for one in some),
                tuple(one.wait_s for one in some),
                outside_s=sum(one.outside_s for one in some),
                modelled=some[0].modelled,
            )
        )
    return found
