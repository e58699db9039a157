"""Worth of a sample, and learning rates, by batch."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.convergence.batch_efficiency import (
    adascale,
    efficiency,
    goodput,
    linear,
    square_root,
)
from tests.messages import raises_message

some = st.floats(1.0, 1e6)


@given(some, some, some)
def test_efficiencies_in_both_directions_are_inverse(phi: float, base: float, batch: float) -> None:
    there = efficiency(phi, base, batch)

    assert there * efficiency(phi, batch, base) == pytest.approx(1.0)
    assert (there < 1) == (batch > base) or there == 1


@given(some, some, st.floats(1.0, 100.0))
def test_adascale_lies_between_constant_and_linear(phi: float, base: float, times: float) -> None:
    rate = adascale(0.1, base, base * times, phi)

    assert 0.1 * (1 - 1e-12) <= rate <= linear(0.1, base, base * times) * (1 + 1e-12)


def test_rules_at_four_times_the_batch() -> None:
    assert linear(0.1, 64, 256) == pytest.approx(0.4)
    assert square_root(0.1, 64, 256) == pytest.approx(0.2)
    assert adascale(0.1, 64, 256, phi=64.0) == pytest.approx(0.16)


def test_goodput_is_best_where_more_samples_stop_being_worth_it() -> None:
    """Ten workers of 100 samples/s each need some samples each to be that quick."""
    found = {b: goodput(1000 * b / (b + 200), 500.0, 100, b) for b in range(100, 2001, 50)}

    assert max(found, key=found.__getitem__) == 300


@pytest.mark.parametrize("wrong", [(-1.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)])
def test_invalid_input_is_refused(wrong: tuple[float, float, float]) -> None:
    with raises_message(ValueError):
        efficiency(*wrong)


def test_all_noise_makes_all_samples_worth_the_same() -> None:
    assert efficiency(inf, 10, 1000) == 1.0
