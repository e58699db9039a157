"""Weights of batches: what counts as one, and their sum with one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenstride.errors import ScaleError
from evenstride.runtime.loss.training_step import WeightExchange, checked
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer
from tests.messages import raises_message


@pytest.mark.parametrize(
    "weight", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor([3.0])]
)
def test_anything_that_is_one_number_is_a_weight(weight: float) -> None:
    assert checked(weight) == 3.0
    assert type(checked(weight)) is float


def test_nothing_at_all_is_a_weight() -> None:
    assert checked(0) == 0.0


@pytest.mark.parametrize("weight", [-1, -1e-9, float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    with raises_message(ScaleError):
        checked(weight)


def test_alone_the_sum_is_the_weight_itself_and_may_be_asked_for_again() -> None:
    exchange = WeightExchange(lambda: None, RankClock(StepTimer([])))

    exchange.start(1e300)
    assert exchange.total() == exchange.total() == 1e300

    exchange.start(2)
    assert exchange.total() == 2.0


def test_a_bad_weight_never_reaches_the_others() -> None:
    exchange = WeightExchange(lambda: None, RankClock(StepTimer([])))
    exchange.start(5)

    with pytest.raises(ScaleError):
        exchange.start(-5)

    assert exchange.total() == 5.0
