"""Each step is compared with what other splits would have made of it, under the same noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.speedup import SplitReference, equal_split, judged_time
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.time_model.estimates import TimeModel
from evenstride.core.time_model.observation import Measurements, Observation

FLEET = Fleet((Worker("fast"), Worker("slow")), 12)
MODEL = TimeModel.affine([0.0, 0.0], [0.1, 0.3])  # best 9/3 in 0.9 s, equal 6/6 in 1.8 s
COMMUNICATION_S = 0.25


def _ran(shares: tuple[int, int], times_s: list[tuple[float, float]], first: int = 0) -> Ledger:
    reported = tuple(
        Observation(
            worker,
            share,
            first,
            tuple(both_s[worker] for both_s in times_s),
            tuple(max(both_s) - both_s[worker] + COMMUNICATION_S for both_s in times_s),
        )
        for worker, share in enumerate(shares)
    )
    return Ledger.empty(2).book(
        Measurements.of(reported), SplitReference.of(MODEL, FLEET, equal_split(FLEET))
    )


def test_a_fleet_with_another_bound_has_its_own_equal_split() -> None:
    bounded = Fleet((Worker("fast", max_share=4), Worker("slow")), 12)

    assert [equal_split(fleet) for fleet in (FLEET, bounded, FLEET)] == [(6, 6), (4, 8), (6, 6)]
    assert hash(FLEET) == hash(Fleet(FLEET.workers, 12))


def test_an_equal_split_saves_nothing_to_the_last_digit() -> None:
    slowest_s, lasting_s = np.full(100, 0.034), np.full(100, 0.037)

    judged = judged_time(lasting_s, slowest_s, np.stack([slowest_s, slowest_s]))

    assert judged.saved_s == 0.0


def test_an_equal_split_is_as_fast_as_itself_whatever_the_noise() -> None:
    ledger = _ran((6, 6), [(0.6, 1.8), (0.7, 3.6), (5.0, 1.9)])

    assert ledger.judged_steps == 3
    assert ledger.equal_s == pytest.approx(ledger.judged_s)
    assert ledger.judged_s == ledger.took_s == pytest.approx(10.4 + 3 * COMMUNICATION_S)
    assert ledger.best_s == pytest.approx(5.2 + 3 * COMMUNICATION_S)
    assert ledger.compared
    assert ledger.efficiency_model == pytest.approx(5.95 / 11.15)
    assert ledger.speedup_model == pytest.approx(1.0)
    assert ledger.bound_model == pytest.approx(11.15 / 5.95)


def test_the_best_split_is_as_fast_as_the_best() -> None:
    ledger = _ran((9, 3), [(0.9, 0.9), (1.0, 0.9)])

    assert ledger.judged_s == pytest.approx(1.9 + 2 * COMMUNICATION_S)
    assert ledger.best_s == pytest.approx(1.9 + 2 * COMMUNICATION_S)
    assert ledger.equal_s == pytest.approx(3.8 + 2 * COMMUNICATION_S)


def test_a_step_is_as_long_as_for_its_workers_on_average() -> None:
    """What one is late by in a step comes back in its next: the longest of each adds up to more."""
    early = Observation(0, 9, 0, (0.9, 0.9), (0.3, 0.1))
    late = Observation(1, 3, 0, (0.9, 0.9), (0.1, 0.3))
    reference = SplitReference.of(MODEL, FLEET, equal_split(FLEET))

    ledger = Ledger.empty(2).book(Measurements.of((early, late)), reference)

    assert ledger.took_s == pytest.approx(2.2)
    assert (ledger.best_s, ledger.equal_s) == pytest.approx((2.2, 4.0))


def test_times_that_do_not_fit_together_are_not_compared() -> None:
    """No worker waited for the slower one, so nothing would be left of a balanced step."""
    reported = (Observation(0, 3, 0, (0.1,), (0.0,)), Observation(1, 9, 0, (2.7,), (0.0,)))
    reference = SplitReference.of(MODEL, FLEET, equal_split(FLEET))
    ledger = Ledger.empty(2).book(Measurements.of(reported), reference)

    assert ledger.judged_steps == 1
    for one in (ledger, Ledger.empty(2)):
        assert not one.compared
        assert one.efficiency_model is one.speedup_model is one.bound_model is None


def test_a_tail_step_is_booked_but_not_judged() -> None:
    ledger = _ran((3, 1), [(0.3, 0.3)])

    assert ledger.steps == 1
    assert (ledger.judged_steps, ledger.judged_s, ledger.best_s) == (0, 0.0, 0.0)


def test_without_known_curves_nothing_is_judged() -> None:
    reported = (Observation(0, 6, 0, (0.6,), (0.0,)), Observation(1, 6, 0, (1.8,), (0.0,)))

    assert Ledger.empty(2).book(Measurements.of(reported)).judged_steps == 0


@given(
    st.integers(1, 11),
    st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.01, 9)), min_size=1, max_size=9),
)
def test_no_split_beats_the_best_and_steps_may_be_booked_one_by_one(
    fast: int, times_s: list[tuple[float, float]]
) -> None:
    reference, shares = SplitReference.of(MODEL, FLEET, equal_split(FLEET)), (fast, 12 - fast)
    together, apart = _ran(shares, times_s), Ledger.empty(2)
    for step, both_s in enumerate(times_s):
        for worker, share in enumerate(shares):
            wait_s = max(both_s) - both_s[worker] + COMMUNICATION_S
            seen = Observation(worker, share, step, (both_s[worker],), (wait_s,))
            apart = apart.book(Measurements.of((seen,)), reference)

    assert together.best_s <= together.judged_s * (1 + 1e-12)
    for name in ("steps", "took_s", "judged_s", "equal_s", "best_s", "busy_s", "waited_s"):
        np.testing.assert_allclose(getattr(apart, name), getattr(together, name))
    np.testing.assert_array_equal(apart.slowest_steps, together.slowest_steps)
    np.testing.assert_allclose(apart.caused_s, together.caused_s)
