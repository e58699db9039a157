"""Links that are too fast to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.planner.workload.step_time import links


@given(latency_s=st.floats(1e-6, 0.1), gradient_bytes=st.floats(1e3, 1e10))
def test_a_bandwidth_due_to_rounding_is_ignored(latency_s: float, gradient_bytes: float) -> None:
    """Times of messages alone: what is left for the bytes is rounding, of either sign."""
    times = [(workers, 2 * (workers - 1) * latency_s) for workers in (2, 4, 8)]
    found = links(times, gradient_bytes)

    assert found is not None
    assert found.bytes_per_s is None or found.bytes_per_s <= 1e15


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e11, 1e13])
def test_links_that_can_be_have_their_bandwidth(bytes_per_s: float) -> None:
    times = [(n, 2 * (n - 1) * (1e-5 + 1e9 / n / bytes_per_s)) for n in (2, 4, 8)]
    found = links(times, 1e9)

    assert found is not None
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert found.latency_s == pytest.approx(1e-5, rel=1e-4)
