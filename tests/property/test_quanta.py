"""Property: whole micro-batches, at most one rest, and no such split ends earlier than ours."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.integer_splits import apportion, equal_finish, in_quanta, spans
from evenstride.core.arrays import IntArray
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import InfeasibleShares
from evenstride.sim.engine.virtual_workers import TrueTimes

Rows = list[tuple[float, float, float, int, int, int]]
seconds, per_sample = st.floats(0.0, 1.0), st.floats(1e-3, 1.0)
# Fixed, per sample and shortest time, quantum, least share, room above it. The times are of few
# values, so that many units end at the same instant.
few_s = st.sampled_from([0.0, 0.25, 0.5, 2.0])
rows = st.lists(
    st.tuples(
        few_s | seconds,
        st.sampled_from([0.25, 0.5, 1.0]) | per_sample,
        few_s | st.sampled_from([4.0, 9.0]),
        st.integers(1, 7),
        st.integers(0, 5),
        st.integers(0, 16),
    ),
    min_size=1,
    max_size=3,
)


def _fleet(rows: Rows) -> tuple[TimeModel, IntArray, IntArray, IntArray]:
    fixed, slope, floor, quanta, lower, room = map(np.array, zip(*rows, strict=True))
    return TimeModel(fixed, slope, floor, np.ones(len(rows))), quanta, lower, lower + room


def _keeps_the_rule(split: IntArray, quanta: IntArray, lower: IntArray, upper: IntArray) -> bool:
    least = -(-lower // quanta) * quanta
    inside = bool((least <= split).all() and (split <= upper).all())
    return inside and int(np.count_nonzero(split % quanta)) <= 1


def _every(total: int, quanta: IntArray, lower: IntArray, upper: IntArray) -> Iterator[IntArray]:
    """Yield all splits that keep the rule, one worker taking what the others leave."""
    least = -(-lower // quanta) * quanta
    for taker in range(len(quanta)):
        others = [k for k in range(len(quanta)) if k != taker]
        for some in product(*(range(least[k], upper[k] + 1, quanta[k]) for k in others)):
            split = np.insert(np.array(some, dtype=np.int64), taker, total - sum(some))
            if least[taker] <= split[taker] <= upper[taker]:
                yield split


@given(rows=rows, alike=st.booleans(), data=st.data())
def test_no_split_that_keeps_the_rule_ends_earlier(
    rows: Rows, alike: bool, data: st.DataObject
) -> None:
    model, quanta, lower, upper = _fleet(rows)
    quanta = np.full_like(quanta, quanta[0]) if alike else quanta
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    every = list(_every(total, quanta, lower, upper))

    if not every:
        with pytest.raises(InfeasibleShares):
            equal_finish(model, lower, upper, total, quantum=quanta)
        return
    split = equal_finish(model, lower, upper, total, quantum=quanta)

    assert split.sum() == total
    assert _keeps_the_rule(split, quanta, lower, upper)
    whole = [e for e in every if not (e % quanta).any()]
    assert model.makespan_s(split) == min(map(model.makespan_s, whole or every))
    assert not (whole and (split % quanta).any()), "a rest without need"


@given(rows=rows, scale=st.integers(5, 60), data=st.data())
def test_where_it_begins_changes_nothing(rows: Rows, scale: int, data: st.DataObject) -> None:
    model, quanta, lower, upper = _fleet(rows)
    lower = lower + -lower % quanta
    upper = lower + quanta * scale
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    weights = data.draw(st.lists(per_sample, min_size=len(lower), max_size=len(lower)))
    near = apportion(np.array(weights), total, lower, upper)

    split = equal_finish(model, lower, upper, total, quantum=quanta, near=near)

    assert split.tolist() == equal_finish(model, lower, upper, total, quantum=quanta).tolist()
    assert split.sum() == total
    assert _keeps_the_rule(split, quanta, lower, upper)


@given(rows=rows, quantum=st.integers(1, 7), data=st.data())
def test_equal_quanta_are_one_quantum(rows: Rows, quantum: int, data: st.DataObject) -> None:
    model, quanta, lower, upper = _fleet(rows)
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    found = []

    for given_as in (quantum, np.full_like(quanta, quantum)):
        try:
            found.append(equal_finish(model, lower, upper, total, quantum=given_as).tolist())
        except InfeasibleShares as error:
            found.append([str(error)])

    assert found[0] == found[1]


@given(rows=rows, data=st.data())
def test_the_split_next_to_another_one(rows: Rows, data: st.DataObject) -> None:
    _, quanta, lower, upper = _fleet(rows)
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    weights = data.draw(st.lists(per_sample, min_size=len(lower), max_size=len(lower)))
    shares = apportion(np.array(weights), total, lower, upper)

    if not any(True for _ in _every(total, quanta, lower, upper)):
        with pytest.raises(InfeasibleShares):
            in_quanta(shares, lower, upper, quanta)
        return
    split = in_quanta(shares, lower, upper, quanta)

    assert split.sum() == total
    assert (lower <= split).all() and (split <= upper).all()
    uneven = np.count_nonzero(split % quanta)
    assert uneven <= 1
    assert in_quanta(split, lower, upper, quanta).tolist() == split.tolist()
    whole = any(not (e % quanta).any() for e in _every(total, quanta, lower, upper))
    assert uneven == 0 or not whole, "a rest without need"
    if np.count_nonzero(shares % quanta) <= uneven:
        assert split.tolist() == shares.tolist()
    else:
        assert _keeps_the_rule(split, quanta, lower, upper)
    below, above = shares // quanta * quanta, -(-shares // quanta) * quanta
    least = -(-lower // quanta) * quanta
    if uneven and (least <= below).all() and (above <= upper).all():
        assert (np.abs(split - shares) < quanta).all()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 33)), min_size=1, max_size=30),
)
def test_without_tight_bounds_no_share_moves_by_a_quantum(pairs: list[tuple[int, int]]) -> None:
    shares, quanta = map(np.array, zip(*pairs, strict=True))

    split = in_quanta(shares, np.zeros_like(shares), np.full_like(shares, 10**6), quanta)

    assert split.sum() == shares.sum()
    assert np.count_nonzero(split % quanta) <= 1
    assert (np.abs(split - shares) < quanta).all() or not (split % quanta).any()


@given(
    members=st.lists(
        st.tuples(st.sampled_from([4, 6, 8, 12, 16, 20, 32]), st.sampled_from([1.0, 1.5, 4.0])),
        min_size=2,
        max_size=6,
    ),
    total=st.integers(200, 900),
)
def test_a_remainder_exists_only_if_no_multiples_end_as_early(
    members: list[tuple[int, float]], total: int
) -> None:
    quanta, slope = map(np.array, zip(*members, strict=True))
    model = TimeModel.affine(np.zeros(len(members)), slope)

    split = equal_finish(
        model, np.ones(len(members), int), np.full(len(members), total), total, quantum=quanta
    )

    most, sums = model.capacity(model.makespan_s(split)), {0}
    for quantum, last in zip(quanta.tolist(), most.tolist(), strict=True):
        sums = {s + share for s in sums for share in range(quantum, last + 1, quantum)}
    assert split.sum() == total
    assert np.count_nonzero(split % quanta) == (0 if total in sums else 1)


@given(rows=rows, alike=st.sampled_from([0, 1, 2]), data=st.data())
def test_no_split_has_a_share_beyond_its_span(rows: Rows, alike: int, data: st.DataObject) -> None:
    _, quanta, lower, upper = _fleet(rows)
    quanta = [quanta, np.full_like(quanta, quanta[0]), np.ones_like(quanta)][alike]
    total = data.draw(st.integers(int(lower.sum()), int(upper.sum())))
    weights = data.draw(st.lists(per_sample, min_size=len(lower), max_size=len(lower)))
    every = list(_every(total, quanta, lower, upper))

    if not every:
        with pytest.raises(InfeasibleShares):
            spans(lower, upper, total, quanta)
        return
    fewest, most = spans(lower, upper, total, quanta)

    shares = apportion(np.array(weights), total, lower, upper)
    for split in [*every, in_quanta(shares, lower, upper, quanta)]:
        assert (fewest <= split).all() and (split <= most).all()
    if (quanta == 1).all():
        assert fewest.tolist() == np.min(every, axis=0).tolist()
        assert most.tolist() == np.max(every, axis=0).tolist()


def test_a_split_of_a_huge_batch_takes_little_memory() -> None:
    quanta = np.array([24, 32, 54])
    shares = np.array([300_000_005, 300_000_003, 399_999_992])
    tracemalloc.start()

    split = in_quanta(shares, np.ones(3, np.int64), np.full(3, 10**9), quanta)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert int(split.sum()) == 10**9
    assert not (split % quanta).any()
    assert (np.abs(split - shares) < 3 * 54).all()
    # One bit for every second sample would be 60 MB.
    assert peak_bytes < 1_000_000


def test_a_split_in_multiples_of_a_staircase_is_found() -> None:
    """Its last worker ends after the deadline that the search bisects."""
    times = TrueTimes(
        fixed_s=np.array([0.0, 1.0]),
        per_sample_s=np.ones(2),
        floor_s=np.zeros(2),
        knee=np.full(2, np.inf),
        beyond=np.ones(2),
        wave=np.full(2, 3),
        cliff_at=np.full(2, 2**62),
        cliff=np.ones(2),
        speed=np.ones(2),
    )

    split = equal_finish(times, np.ones(2, np.int64), np.full(2, 10), 10, quantum=np.array([1, 3]))

    assert split.tolist() == [7, 3] or split.tolist() == [4, 6]
