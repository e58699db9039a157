"""Traces of trainings, written by hand, as runs leave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstride.core.control.events import Exchanged, FleetFormed, KeepShares, SetShares
from evenstride.core.fleet import Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.trace.codec import TraceWriter

Record = dict[str, Any]
SAMPLES = 51_200


def life(
    folder: Path,
    records: Iterable[Record] = (),
    *,
    batch: int = 512,
    workers: Sequence[str] = ("one/0",),
    busy_s: Mapping[int, float] | None = None,
    digest: str = "abc",
    device: str = "",
    **header: Any,
) -> Path:
    """Add a life to the trace in a folder: a process that trained and wrote these records.

    Args:
        folder: of the run.
        records: with their ``kind``.
        batch: global batch.
        workers: names; shares are equal.
        busy_s: seconds of each worker's steps, by its number; 5 of them, 0.05 s longer with waits.
        digest: of the model.
        device: accelerator that computed; empty for a processor.
        header: of the trace, in addition to the usual.
    """
    facts: Record = {"policy": "uniform", "evenstride": "0.1.0", "torch": "2.13.0", "bounds": None}
    facts |= {"world_size": len(workers), "global_batch": batch, "started_unix_s": 1.77e9}
    shares = tuple(batch // len(workers) for _ in workers)
    path = folder / "trace.jsonl"
    with TraceWriter(path, {**facts, **header}) as trace:
        formed = FleetFormed(0, 0, batch, tuple(map(Worker, workers)))
        trace.event(0.0, formed, (SetShares(0, shares, "opening"),))
        model = {"parameters": 1_000_000, "gradient_bytes": 4_000_000, "digest": digest}
        trace.record("workload", **model, samples=SAMPLES, device=device)
        seen = [
            Observation(worker, shares[worker], 1, (time_s,) * 5, (0.05,) * 5)
            for worker, time_s in (busy_s or {}).items()
        ]
        trace.event(1.0, Exchanged(6, 6, Measurements.of(seen)), (KeepShares("good as is"),))
        for record in records:
            trace.record(**record)
    return path


def went(step: int, epochs: float) -> Record:
    """Return where a pass over the data begins."""
    return {"kind": "pass", "step": step, "epochs": epochs, "samples": SAMPLES}


def metric(epochs: float, value: float | None, name: str = "loss") -> Record:
    """Return what an evaluation found."""
    return {"kind": "metric", "step": 0, "epochs": epochs, "name": name, "value": value}


def noisy(step: int, scale: float, batch: float = 512, **loss: float | None) -> Record:
    """Return a measured step whose gradient has this noise scale, and is of length 1."""
    norms = {"parts": 2, "batch": batch, "local": 1 + 2 * scale / batch, "mean": 1 + scale / batch}
    return {"kind": "noise", "step": step, **norms, **loss}
