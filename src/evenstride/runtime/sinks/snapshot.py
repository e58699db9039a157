"""The leader's knowledge at one moment: named numbers, and the same as rows for trackers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from itertools import groupby
from math import isfinite
from re import sub
from typing import Literal, NamedTuple, Protocol

import numpy as np

from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alert, Alerts
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import NoiseOfRun
from evenstride.core.time_model.observation import Measurements

PREFIX = "evenstride_"
"""Prefix of every metric name in Prometheus."""
_LONGEST = 200  # characters of a label; MLflow allows 250 in a tag


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that sinks receive."""

    name: str  # without the prefix; ends in the unit if the unit has a name
    unit: str
    means: str
    # has one value for each worker, or for each `name` of a mean
    label: Literal["", "worker", "name"] = ""

    @property
    def counts(self) -> bool:
        """Whether the metric is a counter, which never decreases within a process."""
        return self.name.endswith("_total")


METRICS = (
    Metric("step", "steps", "steps committed, over all restarts that loaded a state"),
    Metric("epochs", "epochs", "epochs trained, over all restarts, with fractions"),
    Metric("global_batch_samples", "samples", "samples of a full step over all workers"),
    Metric("step_seconds", "s", "mean step time: slowest worker's work, and communication"),
    Metric("communication_seconds", "s", "time of a step that no split can change, smoothed"),
    Metric("efficiency_model_ratio", "1", "best split's time over the time taken, so far"),
    Metric("speedup_model_ratio", "1", "equal split's time over the time taken, so far"),
    Metric("bound_model_ratio", "1", "equal split's time over the best split's, so far"),
    Metric("equal_step_model_seconds", "s", "time of these steps with the equal split, per step"),
    Metric("best_step_model_seconds", "s", "time of these steps with the best split, per step"),
    Metric("saved_model_seconds", "s", "time saved over the equal split, so far"),
    Metric("changes_total", "changes", "changes of the shares after the opening split"),
    Metric("alerts_total", "alerts", "alerts so far"),
    Metric("gradient_noise_scale", "samples", "batch at which noise and gradient are equal"),
    Metric("gradient_noise_scale_low", "samples", "lower end of its 95 % interval"),
    Metric("gradient_noise_scale_high", "samples", "upper end of its 95 % interval"),
    Metric("metric", "its own", "latest value of a `stride.mean(name=)`", "name"),
    Metric("worker_share_samples", "samples", "its share of a full step", "worker"),
    Metric("worker_busy_seconds", "s", "busy time, per step", "worker"),
    Metric("worker_wait_seconds", "s", "waiting for workers and network, per step", "worker"),
    Metric("worker_caused_seconds", "s", "mean wait of each other worker for it, so far", "worker"),
    Metric("worker_data_seconds", "s", "waiting for data, a part of busy time, per step", "worker"),
    Metric("worker_speed_ratio", "1", "its speed over the best that it sustained", "worker"),
    Metric(
        "worker_memory_cap_samples", "samples", "samples that should fit into its memory", "worker"
    ),
    Metric("worker_memory_peak_bytes", "bytes", "highest peak of its memory so far", "worker"),
    Metric("worker_slow", "0 or 1", "whether an alert names it as slow", "worker"),
    Metric("worker_unneeded", "0 or 1", "whether an alert names it as unneeded", "worker"),
)
"""All metrics, in the order of output."""

BY_NAME = {metric.name: metric for metric in METRICS}


def neutral(text: str) -> str:
    r"""Return a text with its unprintable characters escaped, so that it is safe to show anywhere.

    Different texts stay different. Line ends, terminal escapes, marks of the writing direction and
    the backslash are escaped as in Python.

    >>> print(neutral("node\x1b[2J/0"))
    node\x1b[2J/0
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode()
        for one in text
    )


def error_text(error: Exception) -> str:
    r"""Return type and text of an error, in one line.

    >>> error_text(OSError("no answer\n  in 3 s"))
    'OSError: no answer in 3 s'
    """
    return neutral(" ".join(f"{type(error).__name__}: {error}".split()))


class Sample(NamedTuple):
    """One value: the metric's name in `METRICS`, its label (empty for the run), and the number."""

    metric: str
    label: str
    value: float


class NamedMean(NamedTuple):
    """A mean named by the script: its step and epochs, its name and its value."""

    step: int
    epochs: float | None
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Input of a sink. All texts in it are `neutral`.

    Args:
        unix_s: Time of the snapshot, as a Unix timestamp.
        step: Steps committed, over all restarts that loaded a state.
        epochs: Epochs trained in total; ``None`` if not yet known.
        samples: Current values of all metrics, with the latest value of every named mean.
        found: Named means since the previous snapshot, each with its own step.
        alerts: Alerts since the previous snapshot; their steps are those of this process.
    """

    unix_s: float
    step: int
    epochs: float | None
    samples: tuple[Sample, ...] = ()
    found: tuple[NamedMean, ...] = ()
    alerts: tuple[Alert, ...] = ()


class Sink(Protocol):
    """Interface of a destination for snapshots."""

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot. If it raises, the sink is removed and training continues."""
        ...

    def close(self) -> None:
        """Write pending output and close the sink."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderSnapshot:
    """The leader's knowledge after an exchange."""

    step: int  # committed by this process
    control: Control  # after the exchange's decision
    measured: Measurements  # valid times of the exchange, with the fleet's worker numbers
    ledger: Ledger  # of the process so far
    changes: int  # of the shares
    noise: NoiseOfRun
    formed: int = 0  # step at which its fleet formed, with an empty ledger
    lockstep: bool = True  # whether all workers take the same steps


def numbers_of(known: LeaderSnapshot, before: Ledger, alerts: Alerts) -> Iterator[Sample]:
    """Yield the known values of the run and of each serving worker.

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
    steps, judged = ledger.steps - before.steps, ledger.judged_steps - before.judged_steps
    if control.fleet is not None:
        yield "global_batch_samples", control.fleet.global_batch
    if steps:
        yield "step_seconds", (ledger.took_s - before.took_s) / steps
    yield "communication_seconds", control.communication_s
    if ledger.compared:
        yield "efficiency_model_ratio", ledger.efficiency_model
        yield "speedup_model_ratio", ledger.speedup_model
        yield "bound_model_ratio", ledger.bound_model
        yield "saved_model_seconds", ledger.saved_s
    if ledger.compared and judged > 0:
        yield "equal_step_model_seconds", (ledger.equal_s - before.equal_s) / judged
        yield "best_step_model_seconds", (ledger.best_s - before.best_s) / judged
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
    if known.ledger.steps and workers > 1:
        yield "worker_caused_seconds", known.ledger.caused_s[list(serving)] / (workers - 1)
    if caps:
        known_caps = [np.nan if (cap := caps[rank]) is None else cap for rank in serving]
        yield "worker_memory_cap_samples", np.array(known_caps, dtype=np.float64)
        peaks = (control.memory.models[rank].peaks for rank in serving)
        highest = [max((peak for _, peak in one), default=np.nan) for one in peaks]
        yield "worker_memory_peak_bytes", np.array(highest, dtype=np.float64)
    if control.estimate is not None and len(alerts.names) == workers:
        yield "worker_speed_ratio", alerts.speeds(control.estimate.now)
        yield "worker_slow", alerts.slow.open.astype(np.float64)
        yield "worker_unneeded", alerts.spare.open.astype(np.float64)


def rows_of(snapshot: Snapshot) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield a snapshot as rows of experiment trackers: steps with their values by tag.

    Those of named means come first, then that of the snapshot.

    Cost:
        3 us for each value.
    """
    for step, means in groupby(snapshot.found, key=lambda one: one.step):
        yield step, {tag_of("metric", one.name): one.value for one in means}
    # Means have their own steps, so their latest values are left out here.
    numbers = [sample for sample in snapshot.samples if sample.metric != "metric"]
    if snapshot.epochs is not None:
        numbers.append(Sample("epochs", "", snapshot.epochs))
    if numbers:
        yield snapshot.step, {tag_of(metric, label): value for metric, label, value in numbers}


def tag_of(metric: str, label: str) -> str:
    """Return a tag: one group per metric, with characters that every tracker permits.

    A label with other characters gets a part of its hash, so ``acc@1`` and ``acc 1`` differ. So
    does one that is no plain path, because MLflow refuses ``a//b`` and ``../b``.

    >>> tag_of("step_seconds", ""), tag_of("worker_busy_seconds", "host/0")
    ('evenstride/step_seconds', 'evenstride_worker_busy_seconds/host/0')
    """
    if metric in BY_NAME and not BY_NAME[metric].label:
        return f"evenstride/{metric}"
    allowed = sub(r"[^-/\w.]", "_", label)
    parts = ("_" if part in ("", ".", "..") else part for part in allowed.split("/"))
    allowed = "/".join(parts)[:_LONGEST].rstrip("/")
    if allowed != label:
        digest = blake2s(label.encode("utf-8", "backslashreplace"), digest_size=3)
        allowed += f"-{digest.hexdigest()}"
    return f"evenstride_{metric}/{allowed}"
