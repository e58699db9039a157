"""Machine loads are reported only if a policy predicts from them."""

from __future__ import annotations

from math import isnan

import pytest

from evenstride.core.policies import policy_from_spec
from evenstride.runtime.host.machine_resources import loads_for
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord


@pytest.mark.parametrize("policy", ["adaptive", "uniform", "lb-bsp-cpu:predictor=ema"])
def test_policies_without_predictions_get_no_loads(policy: str) -> None:
    assert all(map(isnan, loads_for(policy_from_spec(policy))()))


def test_a_predicting_policy_gets_fractions() -> None:
    cpu, memory = loads_for(policy_from_spec("lb-bsp-cpu"))()

    assert 0 <= cpu <= 1
    assert 0 < memory < 1


def test_loads_travel_with_the_observations() -> None:
    recorder = Recorder(0, lambda: None, lambda: (0.25, 0.5))
    recorder.append(StepRecord(0, 4, 0.1, 0.0, 0.0, 0.0, 0.0, True))

    (seen,) = recorder.take()

    assert (seen.cpu_load, seen.memory_load) == (0.25, 0.5)
