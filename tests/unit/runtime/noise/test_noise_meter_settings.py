"""How measuring the gradient's noise is requested, and when it is refused."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.noise.noise_parts import SentGradient
from tests.inside import session
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride


@pytest.mark.parametrize("mode", ["asp", "ssp", "local-sgd(every=4)", "delayed"])
def test_modes_without_a_mean_gradient_are_refused(make_stride: MakeStride, mode: str) -> None:
    with raises_message(ConfigError, "noise_every", mode[:3], "bsp-ps"):
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


def test_a_gradient_that_is_sent_in_parts_is_not_measured() -> None:
    model, sent = nn.Linear(2, 1, bias=True), SentGradient(lambda _: None)
    weight, bias = model.parameters()
    weight.grad, bias.grad = torch.full_like(weight, 3.0), torch.full_like(bias, 4.0)

    assert not sent.send([weight.grad]), "this step is not measured"
    sent.begin([weight, bias])
    sent.piece_ended(2.0, last=True)
    assert not sent.send([weight.grad]), "another optimizer sends the bias later"
    assert sent.end() is None
    sent.begin([weight, bias])
    sent.piece_ended(2.0, last=True)
    assert sent.send([weight.grad, bias.grad])
    sent.averaged(5.0)
    whole = sent.end()

    assert whole is not None
    assert (whole.parts, whole.weight, float(whole.over_weight)) == (1, 2.0, 34.0 / 2)
    assert sent.mean == 5.0


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
