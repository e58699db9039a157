"""How sure epochs are that trainings took: one, several at a batch, and at several batches."""

from __future__ import annotations

import pytest
from scipy import stats

from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.workload.epochs_to_target import Epochs, epochs_of
from evenstride.planner.workload.workload_profile import (
    Model,
    Noise,
    ReachedTraining,
    WorkloadProfile,
)
from tests.messages import check_message


def epochs_of_trainings(*trainings: tuple[int, float], noise: Noise | None = None) -> Epochs:
    """Return what trainings tell, each a batch and its epochs."""
    profile = WorkloadProfile(
        evenstride="0.1.0",
        torch="2.13.0",
        made_on="2026-05-01",
        model=Model(parameters=10, gradient_bytes=40),
        samples=5120,
        global_batch=256,
        noise=noise,
        trainings=tuple(ReachedTraining(batch=batch, epochs=epochs) for batch, epochs in trainings),
    )
    return epochs_of(profile, None)


def at(epochs: Epochs, batch: int) -> Interval:
    found = epochs.at(batch)
    assert found is not None
    return found


def test_trainings_that_lie_on_a_line_by_chance_are_not_known_exactly() -> None:
    """A step of 5 % from one to the next at least, and the line's own error next to it."""
    found = at(epochs_of_trainings((256, 10.0), (512, 11.0), (1024, 13.0)), 512)

    assert found.value == pytest.approx(11.0)
    assert found.low < 11.0 * (1 - 1.96 * 0.05)
    assert 11.0 * (1 + 1.96 * 0.05) < found.high < 11.0 * 1.25, "surer than of two trainings"


def test_trainings_that_scatter_more_say_so_themselves() -> None:
    reported = epochs_of_trainings(
        (256, 10.0), (256, 12.0), (512, 9.0), (512, 13.0), (1024, 12.0), (1024, 15.0)
    )

    found = at(reported, 512)

    assert found.high / found.value > 1.4


def test_trainings_at_one_batch_tell_their_scatter() -> None:
    epochs = epochs_of_trainings((256, 12.0), (256, 15.0), (256, 18.0))

    found = at(epochs, 256)

    half = stats.t.ppf(0.975, 2) * 3.0 * (1 + 1 / 3) ** 0.5
    assert found.value == 15.0
    assert (found.low, found.high) == pytest.approx((15.0 - half, 15.0 + half), abs=1e-3)
    check_message(epochs.why, "0.095", "29.9")
    assert epochs.at(512) is None


def test_trainings_that_agree_are_5_percent_apart_at_least() -> None:
    found = at(epochs_of_trainings((256, 15.0), (256, 15.0)), 256)

    assert found.high == pytest.approx(15.0 * (1 + 1.96 * 0.05 * 1.5**0.5), rel=1e-3)


def test_of_a_lone_training_25_percent_are_assumed() -> None:
    found = at(epochs_of_trainings((256, 10.0)), 256)

    assert (found.low, found.value, found.high) == (8.0, 10.0, 12.5)


def test_what_the_noise_says_of_other_batches_is_no_surer_than_the_training() -> None:
    noise = Noise(scale=256.0, low=128.0, high=512.0)

    epochs = epochs_of_trainings((256, 10.0), noise=noise)
    own, other = at(epochs, 256), at(epochs, 768)

    assert (own.low, own.value, own.high) == pytest.approx((8.0, 10.0, 12.5))
    by_noise = 10.0 * (128 + 768) / (128 + 256)
    assert other.value == 20.0
    assert by_noise < other.high < 1.25 * by_noise, "errors of both are independent"
    assert other.low < 10.0 * (512 + 768) / (512 + 256)


def test_the_reason_for_a_law_is_said_and_so_is_weak_evidence() -> None:
    clear, weak = (epochs_of_trainings((64, 30.0), (1024, at_last)) for at_last in (12.0, 29.0))

    check_message(clear.why, "Scavenger", "fall")
    check_message(weak.why, "weak evidence")


def test_noise_that_has_not_settled_is_said() -> None:
    rising, settled = (
        epochs_of_trainings((64, 30.0), noise=Noise(scale=256.0, low=100.0, settled=one)).why
        for one in (False, True)
    )

    check_message(rising, "not settled")
    assert "not settled" not in settled
