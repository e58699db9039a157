"""Property: no integer split inside the bounds finishes earlier than the one we compute."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import apportion, equal_finish, in_quanta
from evenstride.core.arrays import IntArray
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import InfeasibleShares
from tests.messages import raises_message

seconds = st.floats(0.0, 1.0)
per_sample = st.floats(1e-6, 1.0)
speed, least, most = st.floats(0.05, 4.0), st.integers(0, 3), st.integers(3, 9)
workers = st.lists(
    st.tuples(seconds, per_sample, seconds, speed, least, most), min_size=1, max_size=4
)
Rows = list[tuple[float, float, float, float, int, int]]


def _fleet(rows: Rows) -> tuple[TimeModel, IntArray, IntArray]:
    fixed, slope, floor, speeds, lower, upper = map(np.array, zip(*rows, strict=True))
    return TimeModel(fixed, slope, floor, speeds), lower, upper


@given(rows=workers, data=st.data())
def test_the_split_is_as_early_as_exhaustive_search(rows: Rows, data: st.DataObject) -> None:
    model, lower, upper = _fleet(rows)
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))

    split = equal_finish(model, lower, upper, total)

    every = [
        model.makespan_s(np.array(candidate))
        for candidate in product(*(range(a, b + 1) for a, b in zip(lower, upper, strict=True)))
        if sum(candidate) == total
    ]
    assert model.makespan_s(split) == min(every)
    assert split.sum() == total
    assert (lower <= split).all() and (split <= upper).all()


@given(rows=workers, scale=st.integers(30, 400), data=st.data())
def test_large_batches_take_the_bisection_and_stay_optimal(
    rows: Rows, scale: int, data: st.DataObject
) -> None:
    model, lower, upper = _fleet(rows)
    upper = upper * scale
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))

    split = equal_finish(model, lower, upper, total)

    assert split.sum() == total
    assert (lower <= split).all() and (split <= upper).all()
    # Optimal if no sample can move from the last finisher to one that would finish it earlier.
    times = model.at(split)
    last = int(times.argmax())
    if split[last] > lower[last]:
        others = [k for k in range(len(split)) if k != last and split[k] < upper[k]]
        assert all(model.at(split + 1)[k] >= times[last] for k in others)


@given(
    share=st.integers(1, 40),
    count=st.integers(1, 30),
    fixed=seconds,
    slope=per_sample,
    floor=seconds,
)
def test_equal_workers_get_equal_shares(
    share: int, count: int, fixed: float, slope: float, floor: float
) -> None:
    ones = np.ones(count)
    model = TimeModel(fixed * ones, slope * ones, floor * ones, ones)

    split = equal_finish(model, np.ones(count, int), np.full(count, 10**6), share * count)

    assert split.tolist() == [share] * count


@given(rows=workers, quantum=st.integers(2, 8), units=st.integers(1, 60), rest=st.integers(0, 7))
def test_quanta_leave_at_most_one_worker_uneven(
    rows: Rows, quantum: int, units: int, rest: int
) -> None:
    model, _, _ = _fleet(rows)
    count = len(model)
    total = quantum * (units + count) + rest % quantum

    split = equal_finish(model, np.ones(count, int), np.full(count, total), total, quantum=quantum)

    assert split.sum() == total
    assert sum(n % quantum != 0 for n in split) <= 1


@given(
    rows=st.lists(
        st.tuples(per_sample, st.integers(0, 20), st.integers(0, 90)), min_size=1, max_size=5
    ),
    quantum=st.integers(2, 9),
    data=st.data(),
)
def test_quanta_keep_the_bounds_or_are_refused(
    rows: list[tuple[float, int, int]], quantum: int, data: st.DataObject
) -> None:
    slope, lower, room = map(np.array, zip(*rows, strict=True))
    upper, model = lower + room, TimeModel.affine(np.zeros(len(slope)), slope)
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    units, rest = divmod(total, quantum)
    least, whole, there_is_one = -(-lower // quantum), upper // quantum, False
    for taker in range(
        len(slope)
    ):  # the worker that takes the rest has room for it above a multiple
        most = np.where(np.arange(len(slope)) == taker, (upper - rest) // quantum, whole)
        there_is_one |= bool((least <= most).all() and least.sum() <= units <= most.sum())

    if not there_is_one:
        with pytest.raises(InfeasibleShares, match=f"multiples of {quantum}"):
            equal_finish(model, lower, upper, total, quantum=quantum)
        return
    split = equal_finish(model, lower, upper, total, quantum=quantum)
    any_split = apportion(slope, total, lower, upper)
    for some in (split, in_quanta(any_split, lower, upper, quantum)):
        assert some.sum() == total
        assert (lower <= some).all() and (some <= upper).all()
        assert sum(n % quantum != 0 for n in some) <= 1


def test_a_worker_whose_fixed_time_is_hopeless_may_be_left_out() -> None:
    class IdleForFree:
        """Times of workers that cost nothing without samples."""

        def at(self, shares: IntArray) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            times = np.array([0.0, 5.0]) + np.array([0.01, 0.01]) * shares
            return np.where(shares > 0, times, 0.0)

        def capacity(self, deadline_s: float) -> IntArray:
            free = np.floor((deadline_s - np.array([0.0, 5.0])) / 0.01)
            return np.maximum(free, 0).astype(np.int64)

    split = equal_finish(IdleForFree(), np.zeros(2, int), np.full(2, 100), 100)

    assert split.tolist() == [100, 0]


@given(rows=workers, scale=st.integers(1, 60), data=st.data())
def test_a_split_to_begin_near_changes_nothing(rows: Rows, scale: int, data: st.DataObject) -> None:
    model, lower, upper = _fleet(rows)
    upper = upper * scale
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    weights = data.draw(st.lists(per_sample, min_size=len(lower), max_size=len(lower)))
    near = apportion(np.array(weights), total, lower, upper)

    split = equal_finish(model, lower, upper, total, near=near)

    assert split.tolist() == equal_finish(model, lower, upper, total).tolist()


@given(rows=workers, copies=st.integers(1, 40), missing=st.integers(0, 40))
def test_units_go_one_by_one_to_the_worker_that_would_finish_first(
    rows: Rows, copies: int, missing: int
) -> None:
    model, lower, upper = _fleet(rows * copies)
    missing = min(missing, int((upper - lower).sum()))
    at = lower.copy()
    for _ in range(missing):
        further_s = np.where(at < upper, model.at(at + 1), np.inf)
        at[np.lexsort((at, further_s))[0]] += 1

    split = equal_finish(model, lower, upper, int(at.sum()))

    assert model.makespan_s(split) == model.makespan_s(at)


def test_ten_thousand_workers_are_split_exactly() -> None:
    rng = np.random.default_rng(0)
    model = TimeModel.affine(rng.random(10_000) * 0.01, rng.random(10_000) * 0.002 + 1e-4)

    split = equal_finish(model, np.ones(10_000, int), np.full(10_000, 10**6), 850_000)

    assert split.sum() == 850_000
    times = model.at(split)
    assert (model.at(split + 1) >= times.max()).all()


@pytest.mark.parametrize("total", [1, 21])
def test_a_total_outside_the_bounds_is_refused(total: int) -> None:
    model = TimeModel.affine([0.0, 0.0], [1.0, 1.0])

    with raises_message(InfeasibleShares, "20"):
        equal_finish(model, np.ones(2, int), np.full(2, 10), total)


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    total=st.integers(0, 2000),
    data=st.data(),
)
def test_apportion_keeps_the_sum_and_the_bounds(
    weights: list[float], total: int, data: st.DataObject
) -> None:
    count = len(weights)
    bounds = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    lower = np.array(data.draw(bounds))
    upper = lower + np.array(data.draw(bounds)) + total
    total += int(lower.sum())

    split = apportion(np.array(weights), total, lower, upper)

    assert split.sum() == total
    assert (lower <= split).all() and (split <= upper).all()


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=8), total=st.integers(0, 5000))
def test_apportion_is_within_one_of_the_exact_proportion(weights: list[float], total: int) -> None:
    count = len(weights)

    split = apportion(np.array(weights), total, np.zeros(count, int), np.full(count, total))

    exact = total * np.array(weights) / sum(weights)
    assert (np.abs(split - exact) < 1 + 1e-6).all()


def test_apportion_rounds_the_published_case_as_published() -> None:
    # The rounding example of DBS (Ye et al., arXiv 2007.11831), as quoted in secondary sources.
    ideal = np.array([13.7, 16.5, 19.6, 14.2])

    assert apportion(ideal, 64, np.ones(4, int), np.full(4, 64)).tolist() == [14, 16, 20, 14]


def test_a_deadline_before_the_floor_leaves_no_share() -> None:
    model = TimeModel(
        np.array([0.0, 0.0]), np.array([0.125, 0.004]), np.array([0.0, 1.0]), np.array([1.0, 1.0])
    )

    assert model.capacity(0.5).tolist() == [4, 0]
    assert equal_finish(model, np.zeros(2, np.int64), np.full(2, 90), 33).tolist() == [8, 25]


def test_weights_next_to_nothing_are_no_overflow() -> None:
    split = apportion(np.array([0.0, 5e-324]), 3, np.zeros(2, np.int64), np.full(2, 9))

    assert split.tolist() == [0, 3]


def test_many_units_that_tie_level_the_shares() -> None:
    # All of the first 500 samples of each end at the floor, so any split of 300 is optimal.
    model = TimeModel(np.zeros(2), np.full(2, 0.002), np.ones(2), np.ones(2))

    split = equal_finish(model, np.array([1, 100]), np.full(2, 500), 300)

    assert split.tolist() == [150, 150]


def test_rounding_of_long_times_leaves_no_worker_without_room() -> None:
    # One ulp of the fixed time is the time of some 15 samples.
    model = TimeModel.affine([1e5, 1e5], [1e-12, 1e-12])

    for total in range(10**6, 10**6 + 60):
        split = equal_finish(model, np.ones(2, int), np.full(2, total // 2 + 1), total)

        assert split.sum() == total
        assert (split <= total // 2 + 1).all()


def test_a_remainder_without_room_on_any_worker_is_refused() -> None:
    # Both are full with one multiple of 8, and neither has room for the rest of 6 above it.
    with raises_message(InfeasibleShares):
        equal_finish(
            TimeModel.affine([0.0, 0.0], [1.0, 1.0]), np.ones(2, int), np.full(2, 11), 22, quantum=8
        )


def test_weights_far_apart_are_still_apportioned() -> None:
    split = apportion(np.array([1.0, 0.5, 1e-40]), 100, np.zeros(3, int), np.full(3, 100))

    assert split.tolist() == [67, 33, 0]


def test_affine_times_have_the_closed_form() -> None:
    # All finish at T = (B + sum a/c) / sum 1/c if shares need not be whole.
    fixed, slope = np.array([0.02, 0.05, 0.01]), np.array([0.001, 0.002, 0.004])
    finish_s = (512 + (fixed / slope).sum()) / (1 / slope).sum()

    split = equal_finish(TimeModel.affine(fixed, slope), np.ones(3, int), np.full(3, 512), 512)

    assert np.abs(split - (finish_s - fixed) / slope).max() < 1


@given(st.integers(1, 10**6), st.sampled_from([2, 4, 6]), st.integers(0, 10**6))
def test_equal_remainders_go_to_the_lower_rank(most: int, count: int, seed: int) -> None:
    whole = np.random.default_rng(seed).integers(1, most + 1, count)
    exact = np.asarray(whole + 0.5, dtype=np.float64)  # each is as close to one as to the other

    split = apportion(exact, int(exact.sum()), np.zeros(count, int), np.full(count, 10**7))

    assert split.tolist() == (whole + (np.arange(count) < count // 2)).tolist()
