"""Policies as values: their texts, and what counts as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from evenstride.core import Fleet, Keep, Move, Situation
from evenstride.core.policies import POLICY_NAMES, is_policy, policy_from_spec, spec_of


class Plain:
    """A policy of a user's own, without settings."""

    opening_steps = 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        raise NotImplementedError

    def decide(self, state: None, situation: Situation) -> tuple[None, Keep]:
        raise NotImplementedError


@dataclass(frozen=True)
class Tuned(Plain):
    gain: float = 0.5


@pytest.mark.parametrize(
    "spec",
    [
        *(name for name in POLICY_NAMES),
        "static:20,100",
        "static:cores",
        "adaptive:min_gain=0.5",
        "adaptive:allow_idle=1",
        "dynamic-batching:dead_band=0.1,window=7",
        "lb-bsp-cpu:predictor=ema",
    ],
)
def test_a_policy_of_ours_is_named_by_the_text_that_makes_it(spec: str) -> None:
    policy = policy_from_spec(spec)

    assert policy_from_spec(spec_of(policy)) == policy
    assert spec_of(policy) == spec


def test_a_policy_of_the_users_own_is_named_by_class_and_settings() -> None:
    assert spec_of(Plain()) == f"{__name__}.Plain"
    assert spec_of(Tuned(0.25)) == f"{__name__}.Tuned(gain=0.25)"


@pytest.mark.parametrize("value", [Plain, "adaptive", None, object()])
def test_what_lacks_the_methods_or_is_a_class_is_no_policy(value: Any) -> None:
    assert not is_policy(value)
    assert is_policy(Plain())
