"""Beliefs about many curves at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.time_model.estimates import CurveEstimates


@given(st.integers(1, 100), st.floats(0, 1), st.integers(0, 1000))
def test_curves_are_chosen_one_by_one_however_few_of_them(
    n: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    one, other = CurveEstimates(rng.random((5, n))), CurveEstimates(rng.random((5, n)))
    mask, kept = rng.random(n) < density, (one.rows.copy(), other.rows.copy())

    chosen = one.where(mask, other).rows

    assert (chosen[:, mask] == one.rows[:, mask]).all()
    assert (chosen[:, ~mask] == other.rows[:, ~mask]).all()
    assert (one.rows == kept[0]).all()
    assert (other.rows == kept[1]).all()
