"""The words of the reasons of `adaptive`."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Recalled
from evenstride.core.time_model.observation import Observation
from tests.unit.core.policies.plant import Plant


class Noisy(Plant):
    """Equal workers whose times vary by 5 %."""

    def __init__(self, count: int) -> None:
        self._noise = np.random.default_rng(0)
        super().__init__("adaptive", 32 * count, [0.01] * count, [0.001] * count)

    def _step(self) -> list[Observation]:
        return [
            replace(seen, busy_s=tuple(s * exp(self._noise.normal(0.0, 0.05)) for s in seen.busy_s))
            for seen in super()._step()
        ]


def test_a_negative_gain_reads_as_slower() -> None:
    """With many noisy workers, every other split may be expected to take longer."""
    plant, kept = Noisy(16), set[str]()
    for _ in range(40):
        plant.exchange()
        kept.add(plant.kept)

    gains = {text for text in kept if "the best split would be" in text}
    assert any(re.search(r"be \d+\.\d% slower$", text) for text in gains)
    assert any(re.search(r"be \d+\.\d% faster, below 0\.5%$", text) for text in gains)
    assert not [text for text in gains if "-" in text]


def test_speeds_from_a_checkpoint_are_followed_before_any_step() -> None:
    earlier, plant = (Plant("adaptive", 64, [0.01, 0.01], [0.001, 0.0014]) for _ in range(2))
    earlier.run(10)

    plant.control, _ = advance(plant.control, Recalled(0, 0, earlier.control.known))

    assert plant.control.shares != (32, 32)


@pytest.mark.parametrize(("slower", "moves_after"), [(1.4, 2), (2.0, 1)])
def test_one_step_decides_only_about_a_large_gain(slower: float, moves_after: int) -> None:
    plant = Plant("adaptive", 64, [0.01, 0.01], [0.001, 0.001 * slower])

    wanted = [plant.exchange() for _ in range(2)]

    assert [split != (32, 32) for split in wanted].index(True) + 1 == moves_after
