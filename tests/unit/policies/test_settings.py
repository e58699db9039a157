"""A setting out of its range is refused with its name and its range."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import pytest

from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.adaptive import Adaptive
from evenstride.core.policies.dynamic_batching import DynamicBatching
from evenstride.core.policies.omnilearn import OmniLearn
from evenstride.errors import ConfigError

REFUSED = [
    ("adaptive:min_gain=-1", "min_gain is -1.0; it must be from 0 to 1"),
    ("adaptive:min_gain=1.01", "min_gain is 1.01; it must be from 0 to 1"),
    ("adaptive:opening_steps=-5", "opening_steps is -5; it must be from 0 to 8"),
    ("adaptive:opening_steps=9", "opening_steps is 9; it must be from 0 to 8"),
    ("dynamic-batching:dead_band=-1", "dead_band is -1.0; it must be at least 0"),
    ("dynamic-batching:smoothing=-3", "smoothing is -3.0; it must be above 0 and at most 1"),
    ("dynamic-batching:smoothing=0", "smoothing is 0.0; it must be above 0 and at most 1"),
    ("dynamic-batching:smoothing=1.1", "smoothing is 1.1; it must be above 0 and at most 1"),
    ("dynamic-batching:drop=-0.1", "drop is -0.1; it must be from 0 to 1"),
    ("dynamic-batching:drop=20", "drop is 20.0; it must be from 0 to 1"),
    ("omnilearn:dead_band=-1", "dead_band is -1.0; it must be at least 0"),
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
def test_what_is_not_a_number_is_in_no_range(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="is nan; it must be"):
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
