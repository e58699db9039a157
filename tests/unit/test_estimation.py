"""The learned curves: what a worker is, told apart from what happened to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstride.core.estimation import Estimate
from evenstride.core.observation import Measured, Observation, median


def _seen(
    worker: int, share: int, *busy_s: float, step: int = 1, modelled: bool = True
) -> Observation:
    return Observation(worker, share, step, busy_s, (0.0,) * len(busy_s), modelled=modelled)


def _learned(*observations: Observation, workers: int = 1) -> Estimate:
    estimate = Estimate.unknown(workers)
    for seen in observations:
        estimate = estimate.learn(Measured.of((seen,)))
    return estimate


def _at(estimate: Estimate, *shares: int) -> list[float]:
    return [float(t) for t in estimate.model.at(np.array(shares))]


def test_the_first_time_is_believed_at_its_own_share() -> None:
    estimate = _learned(_seen(0, 50, 0.2))

    assert _at(estimate, 50) == pytest.approx([0.2])


@given(
    fixed=st.floats(0.0, 0.05),
    per_sample=st.floats(1e-4, 1e-2),
    shares=st.lists(st.integers(5, 200), min_size=4, max_size=6, unique=True),
)
def test_noise_free_times_at_several_shares_give_back_the_curve(
    fixed: float, per_sample: float, shares: list[int]
) -> None:
    least = min(shares)
    # Flatter curves than this are not believed: any share would seem as good as another.
    assume(per_sample * least >= 0.02 * (fixed + per_sample * least))
    truth = [fixed + per_sample * b for b in shares]
    seen = [_seen(0, b, t, t, t, t) for b, t in zip(shares, truth, strict=True)]

    estimate = _learned(*seen, *seen, *seen)

    for share, time_s in zip(shares, truth, strict=True):
        assert _at(estimate, share) == pytest.approx([time_s], rel=0.02)


def test_one_spike_moves_nothing_and_two_are_a_slow_down() -> None:
    calm = _learned(*[_seen(0, 50, 0.2, 0.2, 0.2, 0.2)] * 5)

    spiked = calm.learn(Measured.of((_seen(0, 50, 0.6),)))
    slowed = spiked.learn(Measured.of((_seen(0, 50, 0.6),)))

    assert _at(spiked, 50) == pytest.approx([0.2], rel=0.01)
    assert _at(slowed, 50) == pytest.approx([0.6], rel=0.1)


def test_a_spike_followed_by_a_usual_step_is_forgotten() -> None:
    calm = _learned(*[_seen(0, 50, 0.2, 0.2, 0.2, 0.2)] * 5)

    after = (
        calm.learn(Measured.of((_seen(0, 50, 0.6),)))
        .learn(Measured.of((_seen(0, 50, 0.2),)))
        .learn(Measured.of((_seen(0, 50, 0.6),)))
    )

    assert _at(after, 50) == pytest.approx([0.2], rel=0.02)


def test_one_fast_step_counts_at_once() -> None:
    slow = _learned(*[_seen(0, 50, 0.6, 0.6, 0.6, 0.6)] * 5)

    assert _at(slow.learn(Measured.of((_seen(0, 50, 0.2),))), 50) == pytest.approx([0.2], rel=0.1)


def test_a_slow_down_keeps_the_shape_that_was_learned() -> None:
    shape = [_seen(0, b, *[0.02 + 0.002 * b] * 4) for b in (20, 60, 100, 140)] * 4

    slowed = _learned(*shape, *[_seen(0, 100, *[2 * 0.22] * 4)] * 2)

    fixed, per_sample = slowed.now.rows[:2, 0]
    assert _at(slowed, 20) == pytest.approx([2 * 0.06], rel=0.1)
    assert fixed / per_sample == pytest.approx(10, rel=0.2)


def test_ghosts_and_unmodelled_steps_teach_nothing() -> None:
    estimate = _learned(_seen(0, 0, 0.1), _seen(0, 9, 5.0, modelled=False))

    assert not estimate.known
    assert estimate.steps.tolist() == [0]


def test_workers_learn_apart_and_are_known_together() -> None:
    one = _learned(_seen(0, 10, 0.1), workers=2)
    both = one.learn(
        Measured.of((_seen(1, 10, 0.4), _seen(0, 10, 0.1, step=2), _seen(1, 10, 0.4, step=2)))
    )

    assert not one.known
    assert both.known
    assert _at(both, 10, 10) == pytest.approx([0.1, 0.4], rel=0.01)
    assert both.steps.tolist() == [2, 2]


def test_more_steps_leave_less_doubt() -> None:
    few = _learned(_seen(0, 50, 0.2, 0.21), _seen(0, 50, 0.2, 0.21))
    many = few.learn(
        Measured.of(_seen(0, 50, *[0.2, 0.21, 0.2, 0.19] * 4, step=9 * n) for n in range(9))
    )

    assert many.relative_std(np.array([50])) < few.relative_std(np.array([50]))


def test_noise_is_learned_from_the_spread_of_the_steps() -> None:
    rng = np.random.default_rng(0)
    noisy = [_seen(0, 50, *(0.2 * (1 + 0.1 * rng.standard_normal(16)))) for _ in range(20)]

    estimate = _learned(*noisy)

    assert np.sqrt(estimate.noise[0]) == pytest.approx(0.1, rel=0.35)


@given(
    times=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40),
    shares=st.lists(st.integers(1, 500), min_size=40, max_size=40),
)
def test_curves_stay_physical_whatever_is_measured(times: list[float], shares: list[int]) -> None:
    estimate = Estimate.unknown(1)

    for share, time_s in zip(shares, times, strict=False):
        estimate = estimate.learn(Measured.of((_seen(0, share, time_s),)))
        fixed, per_sample = estimate.now.rows[:2, 0]
        assert fixed >= -1e-12
        assert per_sample > 0
        assert np.isfinite(estimate.now.rows).all()


@pytest.mark.parametrize(
    ("values", "middle"), [((3.0,), 3.0), ((4.0, 1.0), 2.5), ((9.0, 1.0, 2.0), 2.0)]
)
def test_the_median_is_the_middle(values: tuple[float, ...], middle: float) -> None:
    assert median(values) == middle
