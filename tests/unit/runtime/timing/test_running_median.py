"""Property: a running median is the median of what a list of the latest values holds."""

from __future__ import annotations

from statistics import median_high

from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.timing.step_timer import RunningMedian


@given(values=st.lists(st.floats(0, 100), max_size=60), size=st.integers(1, 35))
def test_the_running_median_is_the_median_of_the_latest_values(
    values: list[float], size: int
) -> None:
    running = RunningMedian(size)
    assert running.median(-1.0) == -1.0

    for count, value in enumerate(values, start=1):
        running.add(value)

        assert running.median(-1.0) == median_high(values[max(0, count - size) : count])
