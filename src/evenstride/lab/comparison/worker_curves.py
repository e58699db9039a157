"""Every worker's true curve, measured with all at work and no synchronisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evenstride.core.time_model.step_times import TimeModel

Curve = Mapping[int, float]
"""Mean seconds of one worker's step at each batch size that was measured."""

TOLERANCE = 0.05
"""Two calibrations that differ by more than this part mean that the machine was disturbed."""


def true_model(curves: Sequence[Curve]) -> TimeModel:
    """Return the affine curves through each worker's measured points.

    Fitted by least squares on relative errors, with a fixed time of at least 0.
    """
    fits = [_affine(curve) for curve in curves]
    return TimeModel.affine([fixed for fixed, _ in fits], [per_sample for _, per_sample in fits])


def _affine(curve: Curve) -> tuple[float, float]:
    sizes = np.array(sorted(curve), dtype=np.float64)
    times_s = np.array([curve[int(b)] for b in sizes])
    proportional = float((times_s / sizes).mean())
    if len(sizes) < 2:
        return 0.0, proportional
    design = np.stack([1.0 / times_s, sizes / times_s], axis=1)
    fixed, per_sample = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if fixed < 0 or per_sample <= 0:
        return 0.0, proportional
    return float(fixed), float(per_sample)


def mean_curves(first: Sequence[Curve], second: Sequence[Curve]) -> list[dict[int, float]]:
    """Return the curves between two calibrations of the same workers."""
    return [
        {size: 0.5 * (a[size] + b[size]) for size in a if size in b}
        for a, b in zip(first, second, strict=True)
    ]


def drift(before: Sequence[Curve], after: Sequence[Curve]) -> float:
    """Return the largest change of a worker's speed between two calibrations, as a part.

    A worker's speed is judged on the sum of its times over all sizes, which averages out what
    a single short measurement is off by.
    """
    changes = []
    for a, b in zip(before, after, strict=True):
        common = a.keys() & b.keys()
        changes.append(abs(sum(b[size] for size in common) / sum(a[size] for size in common) - 1))
    return max(changes)


def achieved_speeds(curves: Sequence[Curve], fastest: float) -> tuple[float, ...]:
    """Return each worker's speed as measured, on the scale of the speeds that were asked for."""
    per_sample = true_model(curves).per_sample_s
    return tuple(round(float(fastest * per_sample.min() / p), 4) for p in per_sample)
