"""Kinds of machines and tasks for tests."""

from __future__ import annotations

from evenstride.core.gradients.noise_scale import Interval
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.planner.search.training_forecast import Kind, TrainingTask
from evenstride.planner.spot_losses import PreemptionRate
from evenstride.planner.workload.epochs_to_target import ByNoise, Epochs
from evenstride.planner.workload.step_time import Curve
from evenstride.planner.workload.workload_profile import Links, Noise


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def kind(
    name: str,
    per_sample_s: float = 0.001,
    usd_per_h: float = 1.0,
    *,
    fixed_s: float = 0.01,
    workers: int = 1,
    place: str = "here",
    noise: float = 0.0,
    most: int | None = None,
    losses_per_h: float | None = None,
    accelerators: str = "",
) -> Kind:
    curve = Curve(fixed_s, per_sample_s, 0.02, noise)
    lost = None if losses_per_h is None else transience(*[losses_per_h] * 20)
    price = exactly(usd_per_h)
    return Kind(name, place, workers, curve, price, most, lost, accelerators)


def transience(*losses_per_h: float) -> PreemptionRate:
    """Return twenty equally likely rates."""
    rates = tuple(rate / 3600 for rate in losses_per_h)
    return PreemptionRate(Exponential(1 / max(rates[9], 1e-9)), rates, "for a test")


def task(
    epochs: Epochs | None = None,
    *,
    samples: int = 100_000,
    gradient_bytes: float = 4e6,
    links: Links | None = Links(latency_s=1e-4, bytes_per_s=1.25e9),  # noqa: B008
) -> TrainingTask:
    return TrainingTask(
        samples,
        epochs or ByNoise(10.0, 256, Noise(scale=1000.0, low=700.0, high=1500.0)),
        gradient_bytes,
        links,
    )
