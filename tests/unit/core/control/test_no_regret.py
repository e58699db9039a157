"""Noise never makes the split slower than the equal one by more than 0.5 %."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import ExchangeAfter, Exchanged, FleetFormed, SetShares
from evenstride.core.control.state import Control
from evenstride.core.fleet import FloatArray, Shares, Worker
from evenstride.core.policies.adaptive import Adaptive
from evenstride.core.policies.dynamic_batching import DynamicBatching
from evenstride.core.policy import Policy
from evenstride.core.time_model.observation import Measurements, Observation

FIXED_S, PER_SAMPLE_S, BATCH = 0.010, 0.00125, 32
STEPS = 1500


def slowdown(policy: Policy[Any], workers: int, noise: float | FloatArray, seed: int) -> float:
    """Return the time of equal, noisy workers under a policy, over that of the equal split.

    Noise lengthens steps by a half-normal part, and one in 200 doubles. It is one for all, or
    each worker's own.
    """
    dice = np.random.default_rng(seed)
    noises = 1.0 + np.abs(dice.normal(0, noise, (STEPS, workers)))
    noises += dice.random((STEPS, workers)) < 0.005
    fleet = tuple(Worker(str(rank)) for rank in range(workers))
    formed = FleetFormed(0, 0, BATCH * workers, fleet)
    control, (opening, *_, after) = advance(Control(policy), formed)
    assert isinstance(opening, SetShares)
    assert isinstance(after, ExchangeAfter)
    shares, taken_s, begun = opening.shares, 0.0, 0
    while begun < STEPS:
        stop = min(begun + after.steps, STEPS)
        busy_s = (FIXED_S + PER_SAMPLE_S * np.array(shares)) * noises[begun:stop]
        taken_s += busy_s.max(axis=1).sum()
        event = Exchanged(stop, stop, Measurements.of(observed(begun, shares, busy_s)))
        control, (decision, *_, after) = advance(control, event)
        assert isinstance(after, ExchangeAfter)
        begun, shares = stop, decision.shares if isinstance(decision, SetShares) else shares
    equal_s = ((FIXED_S + PER_SAMPLE_S * BATCH) * noises).max(axis=1).sum()
    return float(taken_s / equal_s)


def observed(begun: int, shares: Shares, busy_s: np.ndarray) -> tuple[Observation, ...]:
    steps = len(busy_s)
    return tuple(
        Observation(rank, share, begun, tuple(map(float, busy_s[:, rank])), (0.0,) * steps)
        for rank, share in enumerate(shares)
    )


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.10])
def test_equal_workers_stay_as_fast_as_under_the_equal_split(workers: int, noise: float) -> None:
    slowdowns = [slowdown(Adaptive(), workers, noise, seed) for seed in range(4)]

    assert max(slowdowns) <= 1.005


def test_a_noise_margin_shortens_steps_where_noise_is_unequal() -> None:
    noise = np.array([0.0, 0.0, 0.0, 0.3])

    plain = [slowdown(Adaptive(), 4, noise, seed) for seed in range(4)]
    early = [slowdown(Adaptive(noise_margin=1.0), 4, noise, seed) for seed in range(4)]

    assert np.mean(early) < 0.99 * np.mean(plain)


def test_a_rule_that_follows_noise_would_be_noticed() -> None:
    slowdowns = [slowdown(DynamicBatching(), 4, 0.20, seed) for seed in range(4)]

    assert max(slowdowns) > 1.005
