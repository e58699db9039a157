"""What is told, under which name and in which unit: one table for all sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "evenstride_"
"""What comes before every name in Prometheus."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that is told.

    Args:
        name: without the prefix; it ends in its unit where that has a name of its own.
        unit: of the number.
        means: in one line.
        label: what there is one number for each of: ``worker``, or ``name`` of a mean.
    """

    name: str
    unit: str
    means: str
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
