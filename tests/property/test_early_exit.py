"""The split in force is kept without a search only if no other split is that much better."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.time_model.estimates import CurveEstimates, Estimate

_BATCH = 12
_some_s = st.floats(1e-3, 0.1)


@st.composite
def _forecasts(draw: st.DrawFn) -> StepForecast:
    quantum = draw(st.sampled_from([1, 2, 4]))
    bounds = [(draw(st.integers(1, 2)), draw(st.integers(8, 12))) for _ in range(3)]
    workers = tuple(
        Worker(f"host/{rank}", low, high, quantum=quantum)
        for rank, (low, high) in enumerate(bounds)
    )
    curves = CurveEstimates.certain(
        np.array([draw(_some_s) for _ in workers]), np.array([draw(_some_s) for _ in workers])
    )
    doubt = np.array([draw(st.floats(1e-4, 0.05)) for _ in workers])
    known = Estimate.unknown(3).knowing(
        slice(None), curves.times(1.0, doubt), np.full(3, 1e-4), np.full(3, 5)
    )
    return StepForecast(known, Fleet(workers, _BATCH))


@given(_forecasts(), st.floats(0.3, 3.0))
def test_a_step_that_is_out_of_reach_has_no_split(outlook: StepForecast, part: float) -> None:
    fleet = outlook.fleet
    splits = [
        np.array(split)
        for split in product(range(1, _BATCH + 1), repeat=3)
        if sum(split) == _BATCH
        and all(
            low <= n <= high for low, n, high in zip(fleet.lower, split, fleet.upper, strict=True)
        )
        and np.count_nonzero(np.array(split) % fleet.quanta) < 2
    ]
    steps_s = [outlook.step_s(split) for split in splits]
    limit_s = part * min(steps_s, default=1.0)

    assert outlook.may_reach(limit_s) or min(steps_s, default=np.inf) > limit_s


def test_a_step_within_reach_is_worth_a_search() -> None:
    workers = tuple(Worker(f"host/{rank}") for rank in range(2))
    curves = CurveEstimates.certain(np.zeros(2), np.array([0.01, 0.03]))
    known = Estimate.unknown(2).knowing(slice(None), curves, np.full(2, 1e-4), np.full(2, 5))
    outlook = StepForecast(known, Fleet(workers, 8))

    assert outlook.may_reach(0.0601), "6 and 2 samples take that long"
    assert not outlook.may_reach(0.0599)
