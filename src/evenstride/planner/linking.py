"""The links between workers, from what their communication took."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from evenstride.core.observation import Measured, communication_s
from evenstride.planner.lives import Life
from evenstride.planner.workload import Links

_USUAL_LATENCY_S = 1e-4


def links(measured: Iterable[tuple[int, float]], gradient_bytes: float) -> Links | None:
    """Return the links that communication measured with several numbers of workers means.

    A ring of ``W`` takes ``2 (W - 1) (latency + bytes / W / bandwidth)``. With one number of
    workers only, a latency of 0.1 ms is taken out, and the rest is bandwidth.

    Args:
        measured: workers, at least 2, and seconds of their communication.
        gradient_bytes: that each sends.

    Returns:
        ``None`` if nothing was measured.
    """
    rows = [(workers, time_s) for workers, time_s in measured if workers > 1]
    if not rows:
        return None
    workers, times_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    messages = 2 * (workers - 1)
    design = np.stack([messages, messages * gradient_bytes / workers], axis=1)
    if len(set(workers.tolist())) > 1 and gradient_bytes > 0:
        latency_s, per_byte_s = np.linalg.lstsq(design, times_s, rcond=None)[0]
        if latency_s >= 0 and per_byte_s > 0:
            return Links(latency_s=float(latency_s), bytes_per_s=float(1 / per_byte_s))
        if per_byte_s > 0:
            only = float(design[:, 1] @ times_s / (design[:, 1] @ design[:, 1]))
            return Links(latency_s=0.0, bytes_per_s=1 / only)
    rest_s = times_s - messages * _USUAL_LATENCY_S
    carried = float(design[:, 1] @ rest_s)
    if gradient_bytes > 0 and carried > 0:
        per_byte_s = carried / float(design[:, 1] @ design[:, 1])
        return Links(latency_s=_USUAL_LATENCY_S, bytes_per_s=1 / per_byte_s)
    return Links(latency_s=max(float(messages @ times_s / (messages @ messages)), 0.0))


def links_of(life: Life) -> Links | None:
    """Return the links as one life tells them: its communication, with its own workers."""
    workers = life.facts.workers
    if workers < 2 or not life.shares:
        return None
    left_s = communication_s(Measured.of(life.observations), life.shares)
    return None if left_s is None else links([(workers, left_s)], life.facts.gradient_bytes)
