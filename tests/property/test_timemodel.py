"""Step times and the shares that they allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.time_model.estimates import TimeModel


@given(
    st.integers(1, 20),
    st.sampled_from([2, 3, 15]),
    st.sampled_from([1e-6, 1.0, 1e3]),
    st.integers(-1, 1),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_a_capacity_is_the_largest_share_that_ends_by_the_deadline(
    workers: int, decimals: int, scale: float, ulps: int, cliffs: bool, seed: int
) -> None:
    """Deadlines are times of shares, or next to them: there rounding decides."""
    rng = np.random.default_rng(seed)
    numbers = np.round(rng.random((3, workers)), decimals)
    fixed, slope = numbers[0] * scale, np.maximum(numbers[1], 0.01) * scale
    floor = numbers[2] * scale * 10.0 * rng.integers(0, 2, workers)
    model = TimeModel(fixed, slope, floor, rng.choice([1.0, 0.1, 0.3, 7.0], workers))
    if cliffs:
        below = rng.integers(1, 200, workers)
        slow = below + rng.integers(1, 50, workers)
        slow_s = np.maximum(np.round(100.0 * rng.random(workers), decimals), 0.01) * scale
        model = replace(model, limits=(below, slow, slow_s))
    at = rng.choice(model.at(rng.integers(0, 300, workers)))
    deadline_s = float(np.nextafter(at, at + ulps))

    capacity = model.capacity(deadline_s)

    assert ((model.at(capacity) <= deadline_s) | (capacity == 0)).all()
    later = model.at(capacity + 1) > deadline_s
    assert (later | (model.floor_s / model.speed > deadline_s)).all()
