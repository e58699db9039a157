"""How measuring the gradient's noise is asked for, and where that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.errors import ConfigError
from tests.unit.runtime.conftest import MakeStride


@pytest.mark.parametrize("mode", ["bsp-ps", "asp", "ssp", "local-sgd(every=4)", "delayed"])
def test_modes_without_a_mean_gradient_are_refused(make_stride: MakeStride, mode: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'noise_every=5 .* sync="{mode[:3]}.* leave noise_every'
    ):
        make_stride(noise_every=5, sync=mode)

    assert make_stride(noise_every=0, sync=mode).summary().noise is None


@pytest.mark.parametrize("every", [-1, 2.5, "10"])
def test_what_is_no_number_of_steps_is_refused(make_stride: MakeStride, every: Any) -> None:
    with pytest.raises(ConfigError, match=r"noise_every is .*; it must be a whole number of at le"):
        make_stride(noise_every=every)


def test_the_environment_asks_for_it_where_the_script_does_not(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_NOISE", "7")

    asked, told_not_to = make_stride().summary().noise, make_stride(noise_every=0).summary().noise

    assert asked is not None
    assert asked.every == 7
    assert told_not_to is None


def test_measuring_is_our_own_time_and_no_work_of_the_rank(make_stride: MakeStride) -> None:
    stride = make_stride(noise_every=1)
    meter, timer = stride._session.state.noise, stride._session.state.clock.timer
    assert meter is not None
    before_s = timer._excluded_s

    meter._spent(0.25)

    assert meter.own_s == 0.25
    assert timer._excluded_s - before_s == pytest.approx(0.25)
    assert stride.summary().overhead_s >= 0.25
