"""What the leader knows at one moment, as numbers with names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Literal, NamedTuple, Protocol

import numpy as np

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alert, Alerts
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import NoiseOfRun
from evenstride.core.time_model.observation import Measurements

PREFIX = "evenstride_"
"""What comes before every name in Prometheus."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that sinks get."""

    name: str  # without the prefix; ends in its unit where that has a name of its own
    unit: str
    means: str
    # what has a number each: a worker, or the `name` of a mean
    label: Literal["", "worker", "name"] = ""

    @property
    def counts(self) -> bool:
        """Whether it only ever grows in a process: a counter."""
        return self.name.endswith("_total")


METRICS = (
    Metric("step", "steps", "steps committed, over all restarts that loaded a state"),
    Metric("epochs", "epochs", "epochs trained, over all restarts, with the part in hand"),
    Metric("global_batch_samples", "samples", "samples of a full step over all workers"),
    Metric("step_seconds", "s", "mean time of a step: the slowest's work, and communication"),
    Metric("communication_seconds", "s", "time of a step that no split can change, smoothed"),
    Metric("efficiency_model_ratio", "1", "best split's time over the time taken, so far"),
    Metric("speedup_model_ratio", "1", "equal split's time over the time taken, so far"),
    Metric("bound_model_ratio", "1", "equal split's time over the best split's, so far"),
    Metric("changes_total", "changes", "changes of the shares after the opening split"),
    Metric("alerts_total", "alerts", "alerts that were given"),
    Metric("gradient_noise_scale", "samples", "batch at which noise and gradient are as large"),
    Metric("gradient_noise_scale_low", "samples", "lower end of its 95 % interval"),
    Metric("gradient_noise_scale_high", "samples", "upper end of its 95 % interval"),
    Metric("metric", "its own", "latest value of a `stride.mean(name=)`", "name"),
    Metric("worker_share_samples", "samples", "its share of a full step", "worker"),
    Metric("worker_busy_seconds", "s", "its own work, per step", "worker"),
    Metric("worker_wait_seconds", "s", "waiting for others and the network, per step", "worker"),
    Metric("worker_data_seconds", "s", "of its work, waiting for data, per step", "worker"),
    Metric("worker_speed_ratio", "1", "its speed over the best it has kept for a while", "worker"),
    Metric("worker_memory_cap_samples", "samples", "most samples its memory should hold", "worker"),
    Metric("worker_slow", "0 or 1", "whether an alert says that it is slow", "worker"),
    Metric("worker_unneeded", "0 or 1", "whether one says it is not worth its place", "worker"),
)
"""All that is told, in the order in which it is told."""

BY_NAME = {metric.name: metric for metric in METRICS}


def neutral(text: str) -> str:
    r"""Return a text with all that does not print written out, so that it does nothing anywhere.

    Different texts stay different. Line ends, terminal escapes, marks that turn the direction of
    writing and the like are written as in Python; so is the backslash.

    >>> print(neutral("node\x1b[2J/0"))
    node\x1b[2J/0
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode()
        for one in text
    )


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
    """What the leader knows after an exchange."""

    step: int  # committed by this process
    control: Control  # after the exchange's decision
    measured: Measurements  # of the exchange, numbered as in the fleet; sound
    ledger: Ledger  # of the process so far
    changes: int  # of the shares
    noise: NoiseOfRun
    lockstep: bool = True  # whether all workers take the same steps


def numbers_of(known: LeaderSnapshot, before: Ledger, alerts: Alerts) -> Iterator[Sample]:
    """Yield the numbers of the run and of each worker that serves; what is unknown is left out.

    Seconds per step are those since the ledger ``before``.
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
