"""The bands of many virtual workers ask exactly when the band of each real one would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.events import Expect
from evenstride.core.control.schedule import ToleranceBand
from evenstride.sim.engine.virtual_workers import Bands

WORKERS = 3
TIMES = st.sampled_from([0.4, 0.8, 0.95, 1.0, 1.05, 1.3, 3.0])
SHARES = st.sampled_from([0, 4, 8])


def each(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*[values] * WORKERS)


STEPS = st.tuples(each(SHARES), each(TIMES))
EXPECTATIONS = st.tuples(
    each(SHARES), each(st.sampled_from([0.0, 1.0])), each(st.sampled_from([0.1, 0.2]))
)


@given(st.lists(st.tuples(EXPECTATIONS, st.lists(STEPS, max_size=9)), min_size=1, max_size=4))
def test_many_bands_are_as_many_single_ones(history: list[Any]) -> None:
    bands = Bands(WORKERS)

    for (at, expected_s, part), steps in history:
        bands.expect(Expect(expected_s, part), at)
        single = [ToleranceBand(*one) for one in zip(at, expected_s, part, strict=True)]
        for shares, busy_s in steps:
            before = single
            single = [band.step(*one) for band, *one in zip(before, shares, busy_s, strict=True)]
            asks = bands.step(np.array(shares), np.array(busy_s))

            asked = [a.asked and not b.asked for a, b in zip(single, before, strict=True)]
            broke = [
                bool(a.strikes or a.asked) and not b.strikes and not b.asked
                for a, b in zip(single, before, strict=True)
            ]
            assert asks.tolist() == asked
            assert bands.broke[-1].tolist() == broke


def test_without_an_expected_time_no_worker_requests_an_exchange() -> None:
    bands = Bands(2)

    assert not bands.step(np.array([8, 8]), np.array([0.1, 9.0])).any()
    assert not bands.broke[-1].any()


def test_a_slow_step_is_remembered_over_one_at_another_share() -> None:
    bands = Bands(1)
    bands.expect(Expect((1.0,), (0.1,)), (8,))

    asks = [bool(bands.step(np.array([share]), np.array([2.0]))[0]) for share in (8, 4, 8)]

    assert asks == [False, False, True]


@pytest.mark.parametrize(
    ("times_s", "asks"),
    [
        ([0.8], [True]),
        ([1.3], [False]),
        ([1.3, 1.3], [False, True]),
        ([1.3, 1.0, 1.3], [False] * 3),
        # 4 % are a little slow in a band of 10 %, 2 % are not.
        ([1.04] * 7, [False] * 5 + [True, False]),
        ([0.96] * 7, [False] * 5 + [True, False]),
        ([1.02] * 40, [False] * 40),
        ([1.04, 1.04, 0.97] * 20, [False] * 60),
        # A median does not follow a minority of odd steps, however odd.
        ([0.92, 1.0, 1.0] * 20, [False] * 60),
    ],
)
def test_a_fast_step_asks_at_once_and_a_slow_one_when_another_follows(
    times_s: list[float], asks: list[bool]
) -> None:
    bands = Bands(1)
    bands.expect(Expect((1.0,), (0.1,)), (8,))

    assert [bool(bands.step(np.array([8]), np.array([t]))) for t in times_s] == asks


def test_after_an_exchange_earlier_breaks_are_forgotten() -> None:
    bands = Bands(1)
    bands.expect(Expect((1.0,), (0.1,)), (8,))
    bands.step(np.array([8]), np.array([0.5]))

    bands.expect(Expect((1.0,), (0.1,)), (8,))

    assert bands.broke == []
    assert bands.step(np.array([8]), np.array([0.5])).all()
