"""The noise of the gradient in a summary, from fixed figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evenstride.core.gradients.noise_scale import (
    GradientNorms,
    NoiseEstimate,
    NoiseOfRun,
    StepParts,
)
from evenstride.runtime.noise.noise_meter import NoiseMeter, NoiseSummary, noise_summary
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer
from evenstride.trace.codec import dumps
from tests.messages import check_message
from tests.unit.runtime.telemetry.test_summary import RUN

KNOWN = NoiseSummary(20, 150, 512.3, 430.1, 640.2, 3.5e-3, 6.8e-6, 2.314)


def _meter(every: int = 20) -> NoiseMeter:
    return NoiseMeter(every, 3, RankClock(StepTimer([])))


def test_a_scale_with_its_interval_is_one_sentence() -> None:
    check_message(str(KNOWN), "512 samples", "95", "430")


def test_without_an_upper_end_the_lower_one_is_reported() -> None:
    assert "512 weights (95 %: at least 430), gain" in str(
        replace(KNOWN, scale_high=None, unit="weights")
    )


def test_without_a_signal_only_the_lower_end_is_reported() -> None:
    check_message(str(replace(KNOWN, scale=None, scale_high=None)), "430 samples", "95", "150")


def test_a_run_without_measurements_does_not_mention_noise() -> None:
    assert noise_summary(NoiseOfRun(), None) is None
    assert "noise" not in str(RUN)
    assert "gradient noise: scale" in str(replace(RUN, noise=KNOWN))


def test_before_the_first_step_the_interval_is_reported() -> None:
    meter = _meter()
    meter.why = ""

    summary = noise_summary(NoiseOfRun(), meter)

    check_message(str(summary), "20")


def test_other_ranks_refer_to_rank_0() -> None:
    summary = noise_summary(None, _meter())

    assert summary is not None
    check_message(summary.why, "rank 0")


@pytest.mark.parametrize(
    "steps",
    [
        [StepParts(0, 2, 32, 32, 32 * 5.0, 2.0)],  # one step has no interval
        [StepParts(k, 2, 32, 32, 32 * 5.0, 2.0) for k in range(3)],  # no signal
        [StepParts(k, 2, 32, 32, 0.0, 0.0) for k in range(3)],  # nothing at all
        [StepParts(k, 2, 32, 32, 32.0 * (3.0 + k % 2), 2.5) for k in range(30)],
    ],
)
def test_all_figures_are_plain_json(steps: list[StepParts]) -> None:
    known, _ = NoiseOfRun().hear(steps)

    summary = noise_summary(known, _meter())

    plain = json.loads(dumps(replace(RUN, noise=summary).to_dict()))["noise"]
    assert plain["steps"] == len(steps)
    assert plain["noise"] == known.estimate.noise
    assert str(summary).startswith("gradient noise: ")


def test_figures_are_those_of_the_estimate() -> None:
    norms = [GradientNorms(2, 32, 3.0 + k % 2, 2.5) for k in range(30)]
    estimate = NoiseEstimate()
    for one in norms:
        estimate = estimate.after(one)

    summary = noise_summary(NoiseOfRun(estimate, 30), _meter(5))

    scale = estimate.scale()
    assert summary == NoiseSummary(
        every=5,
        steps=30,
        scale=scale.value,
        scale_low=scale.low,
        scale_high=scale.high,
        noise=estimate.noise,
        signal=estimate.signal,
        gain=estimate.gain,
    )
