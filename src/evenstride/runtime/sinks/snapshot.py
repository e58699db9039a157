"""What the leader knows at one moment, as numbers with names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, Protocol

import numpy as np

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alert, Alerts
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_accumulator import NoiseOfRun
from evenstride.core.time_model.observation import Measurements
from evenstride.runtime.sinks.metric_names import neutral


class Sample(NamedTuple):
    """One number: the name in `METRICS`, whom it is of (empty for the run), and its value."""

    metric: str
    label: str
    value: float


class NamedMean(NamedTuple):
    """A mean that the script has named: where the training was, its name and its value."""

    step: int
    epochs: float | None
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a sink is given. All texts in it are `neutral`.

    Args:
        unix_s: when it was taken.
        step: steps committed, over all restarts that loaded a state.
        epochs: trained in all; ``None`` if not known yet.
        samples: all numbers by now, the latest of every named mean included.
        found: means since the snapshot before, each with its own step.
        alerts: given since then; their steps are those of this process.
    """

    unix_s: float
    step: int
    epochs: float | None
    samples: tuple[Sample, ...] = ()
    found: tuple[NamedMean, ...] = ()
    alerts: tuple[Alert, ...] = ()


class Sink(Protocol):
    """Somewhere to tell it."""

    def write(self, snapshot: Snapshot) -> None:
        """Tell what is known now; whatever it raises, the sink is dropped and training goes on."""
        ...

    def close(self) -> None:
        """Write what is left, and end."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderSnapshot:
    """What the leader knows after an exchange.

    Args:
        step: steps committed by this process.
        control: after the exchange's decision.
        measured: what the exchange brought, numbered as in the fleet; sound.
        ledger: of the process so far.
        changes: of the shares.
        noise: of the gradient.
        lockstep: whether all workers take the same steps.
    """

    step: int
    control: Control
    measured: Measurements
    ledger: Ledger
    changes: int
    noise: NoiseOfRun
    lockstep: bool = True


def numbers_of(known: LeaderSnapshot, before: Ledger, alerts: Alerts) -> Iterator[Sample]:
    """Yield the numbers of the run and of each worker that serves; what is unknown is left out.

    Args:
        known: by the leader.
        before: the ledger at the snapshot before; seconds per step are those since then.
        alerts: what is remembered of the workers.
    """
    for metric, value in _of_run(known, before):
        if value is not None:
            yield Sample(metric, "", float(value))
    if known.control.fleet is None:
        return
    labels = [neutral(worker.name) for worker in known.control.fleet.workers]
    for metric, values in _of_workers(known, alerts):
        pairs = zip(labels, values.tolist(), strict=True)
        yield from (Sample(metric, label, value) for label, value in pairs if isfinite(value))


def _of_run(known: LeaderSnapshot, before: Ledger) -> Iterator[tuple[str, float | None]]:
    control, ledger = known.control, known.ledger
    steps = ledger.steps - before.steps
    if control.fleet is not None:
        yield "global_batch_samples", control.fleet.global_batch
    if steps:
        yield "step_seconds", (ledger.took_s - before.took_s) / steps
    yield "communication_seconds", control.communication_s
    if ledger.compared:
        yield "efficiency_model_ratio", ledger.efficiency_model
        yield "speedup_model_ratio", ledger.speedup_model
        yield "bound_model_ratio", ledger.bound_model
    yield "changes_total", known.changes
    if known.noise.steps:
        scale = known.noise.estimate.scale()
        for name, value in (("", scale.value), ("_low", scale.low), ("_high", scale.high)):
            yield f"gradient_noise_scale{name}", value if isfinite(value) else None


def _of_workers(known: LeaderSnapshot, alerts: Alerts) -> Iterator[tuple[str, FloatArray]]:
    control, seen = known.control, known.measured
    shares = np.array(control.shares, dtype=np.float64)
    workers = len(shares)
    owner = np.repeat(seen.worker, seen.steps)
    steps = np.bincount(owner, minlength=workers)
    per_step = np.divide(1.0, steps, out=np.full(workers, np.nan), where=steps > 0)
    yield "worker_share_samples", shares
    yield "worker_busy_seconds", np.bincount(owner, seen.busy_s, workers) * per_step
    yield "worker_wait_seconds", np.bincount(owner, seen.wait_s, workers) * per_step
    yield "worker_data_seconds", np.bincount(seen.worker, seen.sums_s[0], workers) * per_step
    caps, serving = control.memory.caps, control.roster.serving
    if caps:
        told = [caps[rank] for rank in serving]
        yield "worker_memory_cap_samples", np.array([np.nan if c is None else c for c in told])
    if control.estimate is not None and len(alerts.names) == workers:
        yield "worker_speed_ratio", alerts.speeds(control.estimate.now)
        yield "worker_slow", alerts.slow.open.astype(np.float64)
        yield "worker_unneeded", alerts.spare.open.astype(np.float64)
