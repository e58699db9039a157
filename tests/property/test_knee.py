"""The knee of time and cost against that of the package kneed."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.planner.search.selection import knee

# Coarse steps make level stretches and equal corners of the curve likely.
_steps = st.one_of(
    st.floats(0.01, 100.0), st.integers(1, 4).map(float), st.just(1.0), st.floats(1e-3, 1e-2)
)


@st.composite
def _frontiers(draw: st.DrawFn, least: int) -> tuple[list[float], list[float]]:
    """Return times that rise and costs that fall."""
    size = draw(st.integers(least, 12))
    steps = st.lists(_steps, min_size=size, max_size=size)
    return list(accumulate(draw(steps))), list(accumulate(draw(steps)))[::-1]


@given(_frontiers(least=3))
def test_the_knee_is_that_of_kneed_or_the_point_furthest_below_the_line(
    figures: tuple[list[float], list[float]],
) -> None:
    kneed = pytest.importorskip("kneed")
    times_s, usd = figures

    at = knee(times_s, usd)

    found = kneed.KneeLocator(times_s, usd, curve="convex", direction="decreasing").knee
    if found is not None:
        assert times_s[at] == found
        return
    span_s, span = times_s[-1] - times_s[0], usd[0] - usd[-1]
    above = [
        (time_s - times_s[0]) / span_s + (cost - usd[-1]) / span
        for time_s, cost in zip(times_s, usd, strict=True)
    ]
    assert above[at] <= min(above) + 2e-9
