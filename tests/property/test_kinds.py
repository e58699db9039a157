"""Which workers are of one kind, whatever their number, order and doubt."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.time_model.curve_update import bent
from evenstride.core.time_model.estimates import CurveEstimates
from evenstride.core.time_model.pooling import kinds_of


def _curves(time_s: FloatArray, std: FloatArray | float, fixed_part: float = 0.3) -> CurveEstimates:
    """Return curves with these times at a share of 64, known to a part of them."""
    curves = CurveEstimates.certain(fixed_part * time_s, (1 - fixed_part) * time_s / 64)
    return curves.times(1.0, np.broadcast_to(np.square(std), time_s.shape))


def _alike(kinds: IntArray) -> set[frozenset[int]]:
    """Return the workers of each kind, whatever its number."""
    return {frozenset(np.flatnonzero(kinds == kind).tolist()) for kind in np.unique(kinds)}


_times = arrays(np.float64, st.integers(1, 60), elements=st.floats(1e-4, 10.0))
_stds = st.floats(1e-6, 0.3)


@given(_times, _stds)
def test_numbers_run_from_0_without_a_gap(time_s: FloatArray, std: float) -> None:
    kinds = kinds_of(_curves(time_s, std), np.full(len(time_s), 64))

    assert set(kinds.tolist()) == set(range(int(kinds.max()) + 1))
    assert len(set(kinds.tolist())) <= 24


@given(_times, _stds, st.randoms(use_true_random=False))
def test_the_order_of_the_workers_does_not_matter(
    time_s: FloatArray, std: float, random: object
) -> None:
    order = np.array(random.sample(range(len(time_s)), len(time_s)))  # type: ignore[attr-defined]
    shares = np.full(len(time_s), 64)
    straight, shuffled = (kinds_of(_curves(t, std), shares) for t in (time_s, time_s[order]))
    back = np.empty_like(shuffled)
    back[order] = shuffled

    assert _alike(back) == _alike(straight)


@given(_times, _stds)
def test_each_kind_is_a_stretch_of_the_times(time_s: FloatArray, std: float) -> None:
    """Curves of one shape never cross, so no worker lies between two of another kind."""
    kinds = kinds_of(_curves(time_s, std), np.full(len(time_s), 64))[np.argsort(time_s)]

    assert np.count_nonzero(np.diff(kinds)) == len(np.unique(kinds)) - 1


@given(st.integers(1, 60), st.floats(1e-4, 10.0), _stds, st.integers(1, 1 << 20))
def test_equal_workers_are_of_one_kind(n: int, time_s: float, std: float, share: int) -> None:
    assert not kinds_of(_curves(np.full(n, time_s), std), np.full(n, share)).any()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=20), st.floats(1.2, 3.0))
def test_well_known_speeds_are_as_many_kinds(members: list[int], ratio: float) -> None:
    speed = np.repeat(np.arange(len(members)), members)
    time_s = np.asarray(0.001 * ratio**speed, dtype=np.float64)
    kinds = kinds_of(_curves(time_s, 0.005), np.full(len(speed), 64))

    assert _alike(kinds) == _alike(speed)


def test_very_different_times_are_two_kinds_however_doubtful() -> None:
    kinds = kinds_of(_curves(np.array([1.0, 2.0]), 0.9), np.full(2, 64))

    assert kinds.tolist() == [0, 1]


def test_of_more_kinds_than_are_looked_for_the_deepest_cuts_are_made() -> None:
    """Sixteen pairs leave room for eight more cuts: those through the pairs that lie apart."""
    pairs, apart = np.repeat(np.arange(16), 2), np.tile([0.01, 0.05], 8)
    time_s = 0.001 * np.exp(pairs + np.tile([0, 1], 16) * np.repeat(apart, 2))
    kinds = kinds_of(_curves(time_s, 1e-4), np.full(32, 64)).reshape(16, 2)

    assert (kinds[:, 0] != kinds[:, 1]).tolist() == (apart > 0.03).tolist()


def test_workers_are_distinguished_where_they_were_measured() -> None:
    """A split that is decided but not in force says nothing: there, all are as doubtful."""
    time_s = np.array([0.041, 0.041, 0.045, 0.045])
    curves = bent(_curves(time_s, 0.01), np.full(4, 64), np.full(4, 0.17))
    decided = np.full(4, 106)

    assert float(curves.relative_std(decided).min()) > 0.07, "9 % are not many of these"
    assert kinds_of(curves, decided).tolist() == [0, 0, 1, 1]


def test_curves_that_cross_are_distinguished_where_they_differ() -> None:
    """At the middle of their shares, which is where they are known best, these are the same."""
    steep = CurveEstimates.certain(np.zeros(3), np.full(3, 1e-3))
    flat = CurveEstimates.certain(np.full(3, 0.03), np.full(3, 0.25e-3))
    curves = CurveEstimates(np.concatenate([steep.rows, flat.rows], axis=1)).times(
        1.0, np.full(6, 1e-4)
    )
    curves = bent(curves, np.full(6, 40), np.full(6, 0.01))
    kinds = kinds_of(curves, np.array([8, 40, 72, 8, 40, 72]))

    assert np.ptp(curves.time_s(40)) < 1e-9
    assert _alike(kinds) == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}


@pytest.mark.parametrize("workers", [1025, 5000])
def test_of_very_many_workers_those_not_looked_at_are_sorted_in(workers: int) -> None:
    time_s = np.tile([0.05, 0.06, 0.09, 0.06, 0.05], workers // 5)
    kinds = kinds_of(_curves(time_s, 0.005), np.full(workers, 64))

    assert _alike(kinds) == _alike((time_s * 1000).astype(np.int64))


@given(
    arrays(np.float64, (4,), elements=st.floats(0.01, 1.0)),
    st.integers(1, 500),
    st.floats(0.01, 0.3),
)
def test_the_surest_share_is_that_of_least_doubt(
    parts: FloatArray, share: int, doubt: float
) -> None:
    curves = bent(_curves(parts, 0.02), np.full(4, share), np.full(4, doubt))
    surest = curves.surest_share(np.full(4, 64))

    least = curves.relative_std(surest) * (1 - 1e-9)  # next to share 1 it may be flat
    assert (least <= curves.relative_std(1.01 * surest)).all()
    assert (least <= curves.relative_std(np.maximum(surest / 1.01, 1))).all()


@given(_times, _stds, st.integers(1, 1000))
def test_doubt_about_the_speed_alone_is_the_same_at_every_share(
    time_s: FloatArray, std: float, share: int
) -> None:
    shares = np.full(len(time_s), share)

    assert _curves(time_s, std).surest_share(shares).tolist() == shares.tolist()


@pytest.mark.parametrize("apart", np.linspace(0.26, 0.45, 20))
def test_cuts_of_equal_gain_do_not_hang_on_the_order(apart: float) -> None:
    time_s = np.exp(np.array([-apart, 0.0, apart]))

    found = set()
    for order in permutations(range(3)):
        kinds = kinds_of(_curves(time_s[list(order)], 0.3), np.full(3, 64))
        found.add(frozenset(frozenset(order[k] for k in kind) for kind in _alike(kinds)))

    assert len(found) == 1
