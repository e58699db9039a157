"""Measured jobs for tests of the store: steps and epochs that follow exact lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstride.planner.workload.model_store import StoredModel
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Point,
    ReachedTraining,
    WorkloadProfile,
)

SIZES = (32, 128, 512)


def device(
    name: str, fixed_s: float, each_s: float, sizes: tuple[int, ...] = SIZES
) -> DeviceProfile:
    points = tuple(Point(samples=b, step_s=fixed_s + each_s * b, steps=50) for b in sizes)
    return DeviceProfile(type=name, points=points)


def job(
    parameters: int = 1000, script: str = "train.py --lr 0.1", **others: Any
) -> WorkloadProfile:
    facts: dict[str, Any] = {
        "evenstride": "0.1.0",
        "torch": "2.13.0",
        "made_on": "2026-11-20",
        "script": script,
        "model": Model(
            parameters=parameters, gradient_bytes=4.0 * parameters, digest=f"of {parameters}"
        ),
        "samples": 50_000,
        "global_batch": 256,
    }
    return WorkloadProfile(**{**facts, **others})


def trained(epochs: Mapping[int, float]) -> tuple[ReachedTraining, ...]:
    return tuple(ReachedTraining(batch=b, epochs=e) for b, e in epochs.items())


def by_noise(least: float, noise: float) -> tuple[ReachedTraining, ...]:
    """Return trainings of the law of large batches."""
    return trained({b: least * (1 + b / noise) for b in (64, 256, 1024)})


def stored(*profiles: WorkloadProfile) -> list[StoredModel]:
    return [StoredModel(Path(f"{n}.json"), one) for n, one in enumerate(profiles)]
