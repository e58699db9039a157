"""The learned curves: what a worker is, apart from what happened to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation, median


def _seen(
    worker: int, share: int, *busy_s: float, step: int = 1, modelled: bool = True
) -> Observation:
    return Observation(worker, share, step, busy_s, (0.0,) * len(busy_s), modelled=modelled)


def _learned(*observations: Observation, workers: int = 1) -> Estimate:
    estimate = Estimate.unknown(workers)
    for seen in observations:
        estimate = learn_times(estimate, Measurements.of((seen,)))
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

    spiked = learn_times(calm, Measurements.of((_seen(0, 50, 0.6),)))
    slowed = learn_times(spiked, Measurements.of((_seen(0, 50, 0.6),)))

    assert _at(spiked, 50) == pytest.approx([0.2], rel=0.01)
    assert _at(slowed, 50) == pytest.approx([0.6], rel=0.1)


def test_a_spike_followed_by_a_usual_step_is_forgotten() -> None:
    calm = _learned(*[_seen(0, 50, 0.2, 0.2, 0.2, 0.2)] * 5)

    after = learn_times(
        learn_times(
            learn_times(calm, Measurements.of((_seen(0, 50, 0.6),))),
            Measurements.of((_seen(0, 50, 0.2),)),
        ),
        Measurements.of((_seen(0, 50, 0.6),)),
    )

    assert _at(after, 50) == pytest.approx([0.2], rel=0.02)


def test_one_fast_step_counts_at_once() -> None:
    slow = _learned(*[_seen(0, 50, 0.6, 0.6, 0.6, 0.6)] * 5)

    assert _at(learn_times(slow, Measurements.of((_seen(0, 50, 0.2),))), 50) == pytest.approx(
        [0.2], rel=0.1
    )


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
    both = learn_times(
        one,
        Measurements.of((_seen(1, 10, 0.4), _seen(0, 10, 0.1, step=2), _seen(1, 10, 0.4, step=2))),
    )

    assert not one.known
    assert both.known
    assert _at(both, 10, 10) == pytest.approx([0.1, 0.4], rel=0.01)
    assert both.steps.tolist() == [2, 2]


def test_more_steps_leave_less_doubt() -> None:
    few = _learned(_seen(0, 50, 0.2, 0.21), _seen(0, 50, 0.2, 0.21))
    many = learn_times(
        few,
        Measurements.of(_seen(0, 50, *[0.2, 0.21, 0.2, 0.19] * 4, step=9 * n) for n in range(9)),
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
        estimate = learn_times(estimate, Measurements.of((_seen(0, share, time_s),)))
        fixed, per_sample = estimate.now.rows[:2, 0]
        assert fixed >= -1e-12
        assert per_sample > 0
        assert np.isfinite(estimate.now.rows).all()


@pytest.mark.parametrize(
    ("values", "middle"), [((3.0,), 3.0), ((4.0, 1.0), 2.5), ((9.0, 1.0, 2.0), 2.0)]
)
def test_the_median_is_the_middle(values: tuple[float, ...], middle: float) -> None:
    assert median(values) == middle


def _noisy(rng: np.random.Generator, share: int, time_s: float, noise: float) -> Observation:
    return _seen(0, share, float(time_s * np.exp(noise * rng.standard_normal())))


def test_a_small_lasting_change_is_found_by_its_sum() -> None:
    rng = np.random.default_rng(1)
    before = _learned(*[_noisy(rng, 50, 0.2, 0.03) for _ in range(200)])

    after = before
    for _ in range(25):
        after = learn_times(after, Measurements.of((_noisy(rng, 50, 0.22, 0.03),)))

    assert _at(before, 50) == pytest.approx([0.2], rel=0.01)
    assert _at(after, 50) == pytest.approx([0.22], rel=0.02)


def test_noise_alone_is_rarely_regarded_as_a_change() -> None:
    rng = np.random.default_rng(2)
    estimate, changed = Estimate.unknown(1), 0
    for _ in range(2000):
        steps = estimate.former.rows
        estimate = learn_times(estimate, Measurements.of((_noisy(rng, 50, 0.2, 0.05),)))
        changed += bool((estimate.former.rows != steps).any())

    assert changed <= 1


def test_a_speed_that_returns_brings_back_all_that_was_known() -> None:
    rng = np.random.default_rng(3)
    shares = [20, 60, 100, 140] * 10
    known = _learned(*[_noisy(rng, b, 0.02 + 0.002 * b, 0.01) for b in shares])

    slowed = known
    for _ in range(3):
        slowed = learn_times(slowed, Measurements.of((_seen(0, 100, 3 * 0.22),)))
    back = learn_times(slowed, Measurements.of((_seen(0, 100, 0.22),)))

    assert _at(slowed, 100) == pytest.approx([0.66], rel=0.05)
    assert _at(back, 20, 20)[0] == pytest.approx(_at(known, 20)[0], rel=5e-3)
    assert back.relative_std(np.array([20])) < 0.7 * slowed.relative_std(np.array([20]))


def test_a_slow_down_after_a_large_move_of_the_share_keeps_the_shape() -> None:
    # A worker gets fewer samples because it is slow. Its times there are a little too short.
    exchanges = [
        [
            _seen(0, 80, 0.115, 0.114),
            _seen(0, 83, 0.179, 0.137),
            _seen(0, 83, 0.167),
            _seen(0, 83, 0.188, 0.175),
        ],
        [
            _seen(0, 83, 0.193, 0.177),
            _seen(0, 80, 0.18),
            _seen(0, 80, 0.189, 0.175, 0.18, 0.18),
            _seen(0, 80, 0.184),
        ],
        [
            _seen(0, 80, 0.189, 0.166, 0.164, 0.187),
            _seen(0, 80, 0.193),
            _seen(0, 80, 0.18),
            _seen(0, 38, 0.116, 0.088, 0.096),
        ],
        [
            _seen(0, 38, 0.101),
            _seen(0, 38, 0.09),
            _seen(0, 46, 0.109, 0.095, 0.095),
            _seen(0, 46, 0.106),
        ],
        [_seen(0, 46, 0.13, 0.146, 0.156, 0.15), _seen(0, 46, 0.136), _seen(0, 46, 0.14, 0.152)],
    ]
    known = [Estimate.unknown(1)]
    for exchange in exchanges:
        known.append(learn_times(known[-1], Measurements.of(tuple(exchange))))

    before, after = known[-2:]

    longer = _at(after, 46)[0] / _at(before, 46)[0]
    assert longer == pytest.approx(1.33, rel=0.05)
    assert _at(after, 20)[0] / _at(before, 20)[0] == pytest.approx(longer, rel=0.1)


def test_a_wrong_shape_is_no_noise() -> None:
    # The time per sample is the same at all shares, which the prior of the shape does not expect.
    calm = [_seen(0, 100, *[0.1] * 3) for _ in range(4)]
    moves = [_seen(0, share, share * 1e-3) for share in (40, 90, 30, 110, 50, 100)]

    before, after = _learned(*calm), _learned(*calm, *moves)

    assert after.noise[0] == pytest.approx(before.noise[0], rel=0.3)


@pytest.mark.parametrize("shares", [(100,), (100, 101), (100, 100, 120, 120)])
def test_noise_is_known_however_often_shares_change(shares: tuple[int, ...]) -> None:
    dice = np.random.default_rng(1)
    times = [(share, 1e-3 * share * np.exp(0.1 * dice.standard_normal())) for share in shares * 100]

    estimate = _learned(*[_seen(0, share, time_s) for share, time_s in times])

    assert np.sqrt(estimate.noise[0]) == pytest.approx(0.1, rel=0.2)


def test_a_worker_whose_speed_changes_all_the_time_may_be_noisy() -> None:
    factors = (1.0, 1.0, 1.6, 1.6, 0.8, 0.8, 1.9, 1.9, 0.7, 0.7, 1.8, 1.8) * 3
    shares = (100, 60, 90, 50) * 9

    estimate = _learned(
        *[_seen(0, share, share * 1e-3 * f) for share, f in zip(shares, factors, strict=True)]
    )

    assert estimate.noise[0] > 0.2**2


def test_small_speed_ups_that_more_samples_follow_are_no_flat_curve() -> None:
    steady = [_seen(0, 100, 0.094, 0.107), _seen(0, 100, 0.103, 0.098), _seen(0, 100, 0.1, 0.091)]
    halved = [_seen(0, 100, 0.15, 0.158), _seen(0, 66, 0.1, 0.093), _seen(0, 66, 0.107, 0.1)]
    # It gets 14 % faster four times, too little to tell from noise, and gets more samples for it.
    faster = [
        _seen(0, share, *times) for share in (75, 86, 98, 112) for times in ([0.094], [0.106, 0.1])
    ]

    estimate = _learned(*steady * 3, *halved, *faster)

    assert float(estimate.now.fixed_s[0]) / _at(estimate, 66)[0] < 0.5, "in truth it is 0"


def test_a_slow_ramp_does_not_bend_the_curve() -> None:
    """A share that shrinks while the speed falls must not look like a fixed time."""
    estimate = _learned(*[_seen(0, b, 0.02 + 0.002 * b) for b in (20, 60, 100, 140) * 5])
    speed, share = 1.0, 100
    for _ in range(60):
        speed *= 0.985
        time_s = (0.02 + 0.002 * share) / speed
        estimate = learn_times(estimate, Measurements.of((_seen(0, share, time_s),)))
        share = max(10, round((0.22 - 0.02 / speed) / (0.002 / speed)))

    fixed, per_sample = estimate.now.rows[:2, 0]
    assert fixed / per_sample == pytest.approx(10, rel=0.5)


def test_a_ramp_is_not_regarded_as_noise() -> None:
    rng = np.random.default_rng(4)
    estimate = Estimate.unknown(1)
    for step in range(100):
        time_s = 0.2 * 1.005**step
        estimate = learn_times(estimate, Measurements.of((_noisy(rng, 50, time_s, 0.02),)))

    assert np.sqrt(estimate.noise[0]) < 0.035


def test_a_worker_that_often_spikes_has_to_be_slow_for_longer() -> None:
    calm = _learned(*[_seen(0, 50, 0.2) for _ in range(60)])
    nervous = _learned(*[_seen(0, 50, 0.6 if n % 8 == 7 else 0.2) for n in range(60)])

    def steps_to_believe(estimate: Estimate) -> int:
        for slow in range(1, 9):
            estimate = learn_times(estimate, Measurements.of((_seen(0, 50, 0.6),)))
            if _at(estimate, 50)[0] > 0.5:
                return slow
        return 99

    assert steps_to_believe(calm) == 2
    assert 3 <= steps_to_believe(nervous) <= 5


def test_a_spike_while_the_shape_is_unknown_is_survived() -> None:
    """The curve of a worker whose second time was a spike is found nevertheless."""
    truth = {64: 0.447, 3: 0.040, 1: 0.0267, 6: 0.06}
    estimate = _learned(_seen(0, 64, 0.4295), _seen(0, 3, 0.1165))
    for share in (1, 6, 3, 6, 1, 6, 3, 6):
        estimate = learn_times(estimate, Measurements.of((_seen(0, share, truth[share]),)))

    assert _at(estimate, 6) == pytest.approx([truth[6]], rel=0.15)


def test_a_new_fleet_keeps_the_estimates_of_the_workers_that_stayed() -> None:
    known = _learned(_seen(0, 10, 0.1), _seen(1, 10, 0.4), _seen(2, 10, 0.2), workers=3)

    taken = Estimate.unknown(3).taking(known, [(0, 2), (2, 1)])
    guessed = taken.guessed()

    assert _at(taken, 10, 10, 10)[::2] == pytest.approx([0.2, 0.4])
    assert taken.steps.tolist() == [1, 0, 1]
    assert guessed.known
    assert 0.2 < _at(guessed, 10, 10, 10)[1] < 0.4
    assert guessed.relative_std(np.full(3, 10))[1] > 0.4


@pytest.mark.parametrize(("before_s", "then_s", "at_last_s"), [(0.5, 1.0, 1.085), (0.5, 1.0, 0.93)])
def test_one_observation_that_is_an_alarm_in_itself_leads_to_its_own_time(
    before_s: float, then_s: float, at_last_s: float
) -> None:
    """Of five steps, it needs no drift before it; what was kept from earlier drifts is too old."""
    rng = np.random.default_rng(0)

    def seen(time_s: float) -> Observation:
        return _seen(0, 50, *(time_s * np.exp(0.004 * rng.standard_normal(5))).tolist())

    reported = [seen(before_s) for _ in range(40)] + [seen(then_s) for _ in range(40)]

    assert _at(_learned(*reported, seen(at_last_s)), 50) == pytest.approx([at_last_s], rel=0.03)


def test_a_spike_after_a_first_drifting_time_leaves_what_was_believed_before_it() -> None:
    calm = _learned(*[_seen(0, 50, 0.5)] * 40)
    drifting = learn_times(calm, Measurements.of((_seen(0, 50, 0.51),)))
    spiked = learn_times(drifting, Measurements.of((_seen(0, 50, 1.5),)))

    assert drifting.changes.begun.any()
    assert not spiked.changes.begun.any()
    assert (spiked.anchors[0].rows == drifting.anchors[0].rows).all()


def test_unmodelled_steps_count_in_the_time_between_exchanges() -> None:
    calm = _learned(*[_seen(0, 50, 0.004, 0.004, 0.004, 0.004)] * 20)
    first = _seen(0, 50, *[0.004] * 40, modelled=False)

    hiccup = learn_times(calm, Measurements.of((first, _seen(0, 50, *[0.012] * 8))))

    assert _at(hiccup, 50) == pytest.approx([0.004], rel=0.02)


def test_a_hiccup_over_many_short_steps_is_no_change_of_speed() -> None:
    calm = _learned(*[_seen(0, 50, 0.004, 0.004, 0.004, 0.004)] * 20)

    begun = _seen(0, 50, *[0.004] * 40), _seen(0, 50, *[0.012] * 8)
    hiccup = learn_times(calm, Measurements.of(begun))
    lasting = learn_times(hiccup, Measurements.of((_seen(0, 50, *[0.012] * 20),)))

    assert _at(hiccup, 50) == pytest.approx([0.004], rel=0.02)
    assert _at(lasting, 50) == pytest.approx([0.012], rel=0.1)


def test_short_steps_need_not_outlast_a_hiccup_if_each_is_reported_at_once() -> None:
    estimate = _learned(*[_seen(0, 50, 0.004)] * 80)

    for _ in range(2):
        estimate = learn_times(estimate, Measurements.of((_seen(0, 50, 0.012),)))

    assert _at(estimate, 50) == pytest.approx([0.012], rel=0.1)


def test_workers_that_become_slow_together_are_judged_together() -> None:
    """An exchange is asked for after 0.2 s; another worker may be a step short of that."""
    calm = _learned(*[_seen(0, 50, *[0.02] * 10)] * 10)

    begun = _seen(0, 50, *[0.02] * 20), _seen(0, 50, *[0.04] * 4)
    almost = learn_times(calm, Measurements.of((begun[0], _seen(0, 50, *[0.04] * 3))))

    assert _at(almost, 50) == pytest.approx([0.02], rel=0.02)
    assert _at(learn_times(calm, Measurements.of(begun)), 50) == pytest.approx([0.04], rel=0.1)


def test_a_spike_that_a_doubtful_curve_expected_is_forgotten() -> None:
    """It fits a prediction that is far off, so only the next time shows what it was."""
    doubtful = _learned(_seen(0, 64, 0.447))
    spike_s = _at(doubtful, 20)[0] * 1.02

    after = doubtful
    for time_s in (spike_s, 0.153):
        after = learn_times(after, Measurements.of((_seen(0, 20, time_s),)))

    assert spike_s > 1.5 * 0.153
    assert _at(after, 20) == pytest.approx([0.153], rel=0.1)
    assert _at(after, 64) == pytest.approx([0.447], rel=0.1)


def test_two_spikes_of_different_length_are_no_change_of_speed() -> None:
    """After a change, times are alike."""
    rng = np.random.default_rng(3)
    estimate = _learned(*(_noisy(rng, 64, 0.1, 0.04) for _ in range(60)))

    alike = learn_times(estimate, Measurements.of((_seen(0, 64, 0.26), _seen(0, 64, 0.25))))
    unlike = learn_times(estimate, Measurements.of((_seen(0, 64, 0.4), _seen(0, 64, 0.125))))

    assert _at(alike, 64)[0] > 0.2
    assert _at(unlike, 64) == pytest.approx(_at(estimate, 64), rel=0.02)


def test_noise_that_looks_like_spikes_and_changes_is_learned_all_the_same() -> None:
    rng = np.random.default_rng(5)
    estimate = _learned(*(_noisy(rng, 64, 0.1, 0.3) for _ in range(150)))

    assert 0.2 < np.sqrt(estimate.noise[0]) < 0.4


def test_among_very_many_workers_a_faster_one_needs_more_evidence() -> None:
    rng = np.random.default_rng(7)
    seen = [_noisy(rng, 64, 0.1, 0.05) for _ in range(60)]
    few, many = (_learned(*seen, workers=count) for count in (2, 100_000))
    fast_s = _at(few, 64)[0] * float(np.exp(-5.0 * np.sqrt(few.noise[0] + 0.007**2)))

    after = [learn_times(e, Measurements.of((_seen(0, 64, fast_s),))) for e in (few, many)]

    assert _at(after[0], 64)[0] < 1.1 * fast_s < _at(after[1], 64)[0]


def test_a_floor_that_was_learned_is_not_unlearned_at_small_shares() -> None:
    # 0.12 s however few samples: at one sample, 2 % of that would be far too much per sample.
    down = [share for share in (128, 82, 56, 35, 1, 1, 1, 1) for _ in range(3)]

    estimate = _learned(*[_seen(0, share, 0.12) for share in down])

    assert _at(estimate, 1, 60, 128) == pytest.approx([0.12] * 3, rel=0.15)


def test_spikes_that_were_believed_are_not_believed_for_ever() -> None:
    usual, changed, spike = [_seen(0, 50, 0.2)] * 40, [_seen(0, 50, 0.4)] * 40, _seen(0, 50, 1.2)
    # After one change that lasted, the first sign of another one is believed ...
    estimate = _learned(*usual, *changed, spike)
    assert _at(estimate, 50) == pytest.approx([1.2], rel=0.1)

    estimate = _learned(*usual, *changed, *[spike, *changed[:20]] * 3, spike)

    assert _at(estimate, 50) == pytest.approx([0.4], rel=0.05), "... but not after three spikes"


def test_a_newcomer_starts_from_the_curve_of_the_fastest_known_worker() -> None:
    known = _learned(*[_seen(0, 50, 0.03)] * 30, workers=2)

    estimate = learn_times(known, Measurements.of((_seen(1, 50, 0.3),)))

    assert estimate.now.fixed_s[1] == pytest.approx(0.37 * 0.3**0.6 * 0.03**0.4, rel=0.02)


def test_a_first_step_that_is_not_modelled_shows_what_a_new_share_costs() -> None:
    """As of a compiled model: it says nothing of speed, but a move must be worth its cost."""
    known = [_seen(0, 50, 0.2, step=step) for step in range(1, 5)]
    first = _seen(0, 60, 5.24, step=5, modelled=False)
    second, later = _seen(0, 60, 0.24, step=6), _seen(0, 70, 0.28, step=7)

    one_by_one = _learned(*known, first, second)
    together = learn_times(_learned(*known), Measurements.of((first, second)))
    again = _seen(0, 50, 0.2, step=6)
    passes = _learned(*known, _seen(0, 50, 5.2, step=5, modelled=False), again, later)

    for estimate in (one_by_one, together):
        assert estimate.firsts.extra_s == pytest.approx([5.0])
        assert estimate.firsts.split_s(np.array([80])) == pytest.approx(5.0)
        assert estimate.firsts.split_s(np.array([60])) == 0.0
        assert _at(estimate, 50, 60) == pytest.approx([0.2, 0.24], rel=0.05)
    assert passes.firsts.extra_s == [0.0], "the first step of a pass is at a share that it had"


@pytest.mark.parametrize(("compiled", "extra_s"), [(False, 0.0), (True, 2.5)])
def test_the_first_step_of_a_run_shows_what_a_share_costs_if_the_model_is_compiled(
    compiled: bool, extra_s: float
) -> None:
    first = _seen(0, 50, 5.2, step=1, modelled=False)
    estimate = learn_times(Estimate.unknown(1), Measurements.of((first,)), compiled=compiled)

    for step in range(2, 5):
        seen = Measurements.of((_seen(0, 50, 0.2, step=step),))
        estimate = learn_times(estimate, seen, compiled=compiled)

    assert estimate.firsts.extra_s == pytest.approx([extra_s])
    assert _at(estimate, 50) == pytest.approx([0.2]), "it says nothing about speed"


def test_a_share_that_takes_as_long_as_before_shows_the_shape() -> None:
    """A few steps at full speed made the curve too flat, and the shares then go up and down."""
    flat = [_seen(0, 136, *[0.08] * 20), _seen(0, 98, *[0.073] * 2), _seen(0, 136, *[0.08] * 30)]
    slower = [_seen(0, 136, *[0.185] * 4), _seen(0, 98, *[0.16] * 60)]
    down, up = _seen(0, 37, *[0.09] * 4), _seen(0, 98, *[0.19] * 4)

    once = _learned(*flat, *slower, down)
    back = _learned(*flat, *slower, down, up)
    again = _learned(*flat, *slower, down, up, down, up)

    assert 0.115 < _at(once, 98)[0] < 0.16, "so far, it may have become faster"
    for estimate in (back, again):
        assert _at(estimate, 37) == pytest.approx([0.09], rel=0.02)
        assert _at(estimate, 98) == pytest.approx([0.19], rel=0.02)


def test_of_several_first_steps_of_a_run_the_shortest_shows_what_a_share_costs() -> None:
    firsts = [_seen(rank, 50, time_s, modelled=False) for rank, time_s in enumerate((60.2, 3.2))]
    seconds = [_seen(rank, 50, 0.2, step=2) for rank in (0, 1)]

    seen = Measurements.of([*firsts, *seconds])
    estimate = learn_times(Estimate.unknown(2), seen, compiled=True)

    assert estimate.firsts.extra_s == pytest.approx([1.5, 1.5])


def test_a_compiled_model_that_was_warmed_up_says_nothing_of_what_a_share_costs() -> None:
    seen = Measurements.of([_seen(0, 50, 0.2, modelled=False), _seen(0, 50, 0.2, step=2)])

    estimate = learn_times(Estimate.unknown(1), seen, compiled=True)

    assert (estimate.firsts.cost.tolist(), estimate.firsts.extra_s.tolist()) == ([0], [0.0])


def test_times_beyond_a_cliff_bend_no_curve() -> None:
    """They say nothing about the line, so the curve does not fit the share between."""
    flat = [_seen(0, 136, *[0.08] * 20), _seen(0, 98, *[0.073] * 2), _seen(0, 136, *[0.08] * 30)]
    known = [*flat, _seen(0, 136, *[0.185] * 4), _seen(0, 98, *[0.16] * 60)]
    cliff, back = _seen(0, 150, *[0.6] * 4), _seen(0, 98, *[0.19] * 4)

    estimate = _learned(*known, _seen(0, 37, *[0.09] * 4), cliff, back)

    assert estimate.now.per_sample_s[0] > 0.0005, "nearly flat, as 150 samples would be in line"


def test_a_new_time_that_no_shape_explains_is_another_speed() -> None:
    usual, spike = _seen(0, 55, *[0.118] * 10), _seen(0, 54, 0.2328)

    estimate = _learned(usual, spike, _seen(0, 55, *[0.236] * 3))

    assert _at(estimate, 55) == pytest.approx([0.236], rel=0.02)
