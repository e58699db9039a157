"""Property: averaging scaled means over the ranks is the mean over all samples."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.gradients.weighting import loss_factor

micro = st.lists(st.tuples(st.integers(0, 50), st.floats(-10, 10)), min_size=1, max_size=4)


@given(ranks=st.lists(micro, min_size=1, max_size=6))
def test_the_average_of_scaled_means_is_the_global_mean(
    ranks: list[list[tuple[int, float]]],
) -> None:
    total = sum(count for rank in ranks for count, _ in rank)

    averaged = sum(
        loss_factor(len(ranks), count, total) * mean for rank in ranks for count, mean in rank
    ) / len(ranks)

    exact = sum(count * mean for rank in ranks for count, mean in rank) / total if total else 0.0
    assert math.isclose(averaged, exact, rel_tol=1e-12, abs_tol=1e-12)
