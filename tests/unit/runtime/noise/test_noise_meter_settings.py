"""How measuring the gradient's noise is requested, and when it is refused."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError
from evenstride.runtime.noise.noise_meter import NoiseMeter
from tests.inside import session
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride


@pytest.mark.parametrize("mode", ["bsp-ps", "asp", "ssp", "local-sgd(every=4)", "delayed"])
def test_modes_without_a_mean_gradient_are_refused(make_stride: MakeStride, mode: str) -> None:
    with raises_message(ConfigError, "noise_every", mode[:3]):
        make_stride(noise_every=5, sync=mode)

    assert make_stride(noise_every=0, sync=mode).summary().noise is None


@pytest.mark.parametrize("every", [-1, 2.5, "10"])
def test_an_invalid_number_of_steps_is_refused(make_stride: MakeStride, every: Any) -> None:
    with raises_message(ConfigError, "noise_every"):
        make_stride(noise_every=every)


def test_the_environment_sets_the_default(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_NOISE", "7")

    asked, declined = make_stride().summary().noise, make_stride(noise_every=0).summary().noise

    assert asked is not None
    assert asked.every == 7
    assert declined is None


def test_measuring_counts_as_overhead_and_not_as_busy_time(make_stride: MakeStride) -> None:
    now_s, excluded = count(0.0, 0.25), list[float]()
    clock: Any = SimpleNamespace(
        timer=SimpleNamespace(now=lambda: next(now_s), exclude=excluded.append)
    )
    meter = NoiseMeter(1, 1, clock)
    meter.watch(nn.Linear(1, 1))
    meter.begin(Draw(step=0, window=8, share=8, samples=4, first=True, last=False))
    meter.backward_began()

    assert excluded == [0.25, 0.25]
    assert meter.own_s == 0.25, "but for what is done before the step begins"
    stride = make_stride(noise_every=1)
    own = session(stride).state.noise
    assert own is not None
    own.own_s = 0.25
    assert stride.summary().overhead_s >= 0.25
