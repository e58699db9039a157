"""A setting out of its range is refused with its name and its range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan

import pytest

from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.adaptive import Adaptive
from evenstride.core.policies.dynamic_batching import DynamicBatching, OmniLearn
from evenstride.errors import ConfigError
from tests.messages import raises_message

SMOOTHING = "but must be a finite number, above 0 and at most 1; the default is 0.3"
UP_TO_1 = "but must be a finite number from 0 to 1; the default is"
OPENING = "but must be an integer from 0 to 8; the default is 3"
NOT_NEGATIVE = "but must be a finite number, at least 0; the default is"
REFUSED = [
    ("adaptive:min_gain=-1", f"min_gain is -1.0, {UP_TO_1} 0.005"),
    ("adaptive:min_gain=1.01", f"min_gain is 1.01, {UP_TO_1} 0.005"),
    ("adaptive:opening_steps=-5", f"opening_steps is -5, {OPENING}"),
    ("adaptive:opening_steps=9", f"opening_steps is 9, {OPENING}"),
    ("dynamic-batching:dead_band=-1", f"dead_band is -1.0, {NOT_NEGATIVE} 0.05"),
    ("dynamic-batching:smoothing=-3", f"smoothing is -3.0, {SMOOTHING}"),
    ("dynamic-batching:smoothing=0", f"smoothing is 0.0, {SMOOTHING}"),
    ("dynamic-batching:smoothing=1.1", f"smoothing is 1.1, {SMOOTHING}"),
    ("dynamic-batching:drop=-0.1", f"drop is -0.1, {UP_TO_1} 0.2"),
    ("dynamic-batching:drop=20", f"drop is 20.0, {UP_TO_1} 0.2"),
    ("lb-bsp-cpu:every=2", "every is 2, but must be 0 or 1; the default is 0"),
    ("omnilearn:dead_band=-1", f"dead_band is -1.0, {NOT_NEGATIVE} 0.2"),
]


@pytest.mark.parametrize(("spec", "text"), REFUSED, ids=[spec for spec, _ in REFUSED])
def test_a_setting_out_of_range_is_refused(spec: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from_spec(spec)

    assert str(caught.value) == f"policy {spec.partition(':')[0]}: {text}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adaptive(min_gain=nan),
        lambda: DynamicBatching(dead_band=nan),
        lambda: DynamicBatching(smoothing=nan),
        lambda: DynamicBatching(drop=nan),
        lambda: OmniLearn(dead_band=nan),
    ],
)
def test_nan_is_in_no_range(make: Callable[[], object]) -> None:
    with raises_message(ConfigError):
        make()


@pytest.mark.parametrize(
    "spec",
    [
        "adaptive:min_gain=0,opening_steps=0",
        "adaptive:min_gain=1,opening_steps=8",
        "dynamic-batching:dead_band=0,smoothing=1,drop=0",
        "dynamic-batching:dead_band=3,smoothing=0.01,drop=1",
        "omnilearn:dead_band=0",
        "omnilearn:dead_band=3",
    ],
)
def test_the_ends_of_a_range_belong_to_it(spec: str) -> None:
    assert policy_from_spec(spec)


def test_a_class_derived_from_a_policy_may_have_settings_of_its_own() -> None:
    @dataclass(frozen=True)
    class Patient(Adaptive):
        patience: int = 3

    assert Patient(min_gain=0.1).patience == 3
    with raises_message(ConfigError, "min_gain is 2"):
        Patient(min_gain=2)
