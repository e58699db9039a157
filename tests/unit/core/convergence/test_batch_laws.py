"""Epochs by batch under two laws, fitted to what was measured."""

from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.convergence.batch_laws import (
    Law,
    MeasuredTraining,
    fit,
    fit_best,
    gamma_of,
    left_out_error,
)
from tests.messages import raises_message

BATCHES = (64, 128, 256, 512, 1024)


def by_noise(e_min: float, b_noise: float) -> list[MeasuredTraining]:
    return [MeasuredTraining(b, e_min * (1 + b / b_noise)) for b in BATCHES]


def by_gain(e_star: float, theta: float) -> list[MeasuredTraining]:
    """As Scavenger has ResNet18: gamma = 0.55 + 4.55 / sqrt(B)."""
    gammas = [0.55 + 4.55 / sqrt(b) for b in BATCHES]
    return [
        MeasuredTraining(b, e_star + theta * g, g) for b, g in zip(BATCHES, gammas, strict=True)
    ]


@pytest.mark.parametrize("b_noise", [300.0, 10_000.0, -5000.0])
def test_the_noise_law_is_found_whatever_its_sign(b_noise: float) -> None:
    found = fit(by_noise(10.0, b_noise), Law.NOISE)

    assert found.noise_batch == pytest.approx(b_noise, rel=1e-6)
    assert found.epochs(2048).value == pytest.approx(10.0 * (1 + 2048 / b_noise), rel=1e-6)


@pytest.mark.parametrize("theta", [120.0, -30.0])
def test_the_gain_law_is_found_whatever_its_sign(theta: float) -> None:
    found = fit(by_gain(60.0, theta), Law.GAIN)

    assert found.epochs_by.slope == pytest.approx(theta, rel=1e-6)
    reported = found.epochs(384).value
    assert reported == pytest.approx(60.0 + theta * (0.55 + 4.55 / sqrt(384)), rel=1e-6)


@pytest.mark.parametrize("law", list(Law))
def test_the_law_that_holds_is_the_one_that_is_chosen(law: Law) -> None:
    runs = by_gain(20.0, 200.0)
    if law is Law.NOISE:
        runs = [MeasuredTraining(run.batch, 10 + run.batch / 50, run.gamma) for run in runs]
    if law is Law.POWER:
        runs = [MeasuredTraining(run.batch, 0.5 + 0.02 * run.batch**0.7, run.gamma) for run in runs]

    assert fit_best(runs).law is law


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.4, 0.7, 1.3])
def test_the_power_is_found(power: float) -> None:
    raised = [b**power if power else np.log(b) for b in BATCHES]
    found = fit(
        [MeasuredTraining(b, 3.0 + 0.5 * x) for b, x in zip(BATCHES, raised, strict=True)],
        Law.POWER,
    )

    assert found.power == pytest.approx(power)
    reported = found.epochs(384)
    assert reported.value == pytest.approx(
        3.0 + 0.5 * (384**power if power else np.log(384)), rel=1e-6
    )


def test_a_power_needs_a_batch_to_be_judged_by_more_than_its_three() -> None:
    runs = [MeasuredTraining(b, 0.5 + 0.02 * b**0.7) for b in BATCHES]

    assert fit_best(runs[:3]).law is Law.NOISE
    assert fit_best(runs[:4]).law is Law.POWER
    with pytest.raises(ValueError, match="three batches"):
        fit(runs[:2], Law.POWER)


def test_the_power_costs_a_degree_of_freedom_so_that_its_interval_holds_as_often_as_it_says() -> (
    None
):
    random, inside = np.random.default_rng(2), 0
    for _ in range(400):
        true = {b: 0.5 + 0.02 * b**0.7 for b in (*BATCHES, 384)}
        noisy = [
            MeasuredTraining(b, true[b] * (1 + 0.04 * random.standard_normal()))
            for b in 2 * BATCHES
        ]
        reported = fit(noisy, Law.POWER).epochs(384)
        inside += reported.low <= true[384] * (1 + 0.04 * random.standard_normal()) <= reported.high

    assert inside / 400 == pytest.approx(0.95, abs=0.035)


def test_epochs_may_fall_as_batches_grow_as_scavengers_do() -> None:
    """Its figure 8, ResNet18 with 16 workers, read off: the sign is data."""
    read = zip((384, 512, 768, 1024), (234.0, 203.0, 186.0, 167.0), strict=True)
    runs = [MeasuredTraining(b, e, 0.55 + 4.55 / sqrt(b)) for b, e in read]

    assert fit(runs, Law.NOISE).noise_batch < 0
    assert fit(runs, Law.GAIN).epochs_by.slope > 0
    assert left_out_error(runs, Law.GAIN) < left_out_error(runs, Law.NOISE)


def test_an_interval_holds_the_next_run_as_often_as_it_says() -> None:
    random, inside = np.random.default_rng(1), 0
    for _ in range(1000):
        noisy = [
            MeasuredTraining(r.batch, r.epochs * (1 + 0.04 * random.standard_normal()))
            for r in by_noise(10.0, 800.0)
        ]
        reported = fit(noisy, Law.NOISE).epochs(384)
        inside += reported.low <= 14.8 * (1 + 0.04 * random.standard_normal()) <= reported.high

    assert inside / 1000 == pytest.approx(0.95, abs=0.025)


def test_steps_are_epochs_times_samples_by_batch() -> None:
    found = fit(by_noise(10.0, 1000.0), Law.NOISE)

    assert found.steps(500, 10_000).value == pytest.approx(15.0 * 20)


def test_epochs_never_fall_below_0() -> None:
    found = fit(
        [MeasuredTraining(64, 10.0), MeasuredTraining(128, 5.0), MeasuredTraining(192, 1.0)],
        Law.NOISE,
    )

    assert found.epochs(4096).value == 0.0
    assert found.epochs(4096).low == 0.0


@pytest.mark.parametrize("noise_known", [True, False])
def test_two_batches_follow_scavengers_law_if_epochs_fall_and_else_that_of_large_batches(
    noise_known: bool,
) -> None:
    """Every law fits two batches, so an error of 0 there says nothing."""

    def ends(runs: list[MeasuredTraining]) -> list[MeasuredTraining]:
        return [
            replace(run, gamma=run.gamma if noise_known else None) for run in runs[:: len(runs) - 1]
        ]

    falling, rising = ends(by_gain(60.0, 120.0)), ends(by_gain(60.0, -30.0))

    assert fit_best(falling).law is Law.GAIN
    assert fit_best(rising).law is Law.NOISE
    assert fit_best(falling).left_out is None
    with raises_message(ValueError):
        left_out_error(falling, Law.GAIN)


def test_scavengers_law_needs_no_noise_to_predict_epochs() -> None:
    """Epochs are a line in gamma, and gamma is one in 1 / sqrt(B)."""
    known = by_gain(60.0, 120.0)
    bare = [replace(run, gamma=None) for run in known]
    constant = [replace(run, gamma=1.0) for run in known]

    for runs in (bare, constant):
        found = fit(runs, Law.GAIN)
        assert found.gamma_by is None
        assert found.epochs(384).value == pytest.approx(fit(known, Law.GAIN).epochs(384).value)
    assert fit_best(bare).law is Law.GAIN


def test_of_epochs_that_rise_as_ours_did_the_law_of_large_batches_misses_less() -> None:
    """Epochs grew as the power 0.7 to 0.8 of the batch in `benchmarks/forecast.py`."""
    ends = [MeasuredTraining(batch, batch**0.75) for batch in (64, 1024)]

    errors = {
        law: abs(fit(ends, law).epochs(192).value / 192**0.75 - 1)
        for law in Law
        if law is not Law.POWER
    }

    assert errors[Law.NOISE] == pytest.approx(0.15, abs=0.005)
    assert errors[Law.GAIN] == pytest.approx(1.17, abs=0.005)
    assert fit_best(ends).law is Law.NOISE


def test_the_error_that_led_to_a_law_is_kept_with_it() -> None:
    runs = by_gain(20.0, 200.0)
    runs[2] = replace(runs[2], epochs=1.05 * runs[2].epochs)

    found = fit_best(runs)

    assert found.left_out == left_out_error(runs, found.law)
    assert 0.01 < found.left_out < 0.05


def test_one_batch_tells_no_law() -> None:
    with raises_message(ValueError):
        fit_best([MeasuredTraining(64, 10.0), MeasuredTraining(64, 11.0)])


@given(st.floats(0.1, 1e6), st.integers(2, 10_000), st.integers(2, 64))
def test_gain_and_noise_scale_are_the_same_knowledge(scale: float, batch: int, parts: int) -> None:
    gamma = gamma_of(scale, batch, parts)

    assert 1 / parts <= gamma <= 1
    if gamma < 1 - 1e-9:
        gain = gamma * parts
        assert batch * (gain - 1) / (parts - gain) == pytest.approx(scale, rel=1e-4)


def test_the_ends_of_the_gain_are_agreement_and_noise_alone() -> None:
    assert gamma_of(0.0, 100, 4) == 1 / 4
    assert gamma_of(inf, 100, 4) == 1.0
