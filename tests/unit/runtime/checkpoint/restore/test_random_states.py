"""The random state of a device is saved under the device's type, where there is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstride.runtime.checkpoint.restore.saved_state import capture_random, restore_random

HOST = {"torch", "numpy", "python"}


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_a_device_without_a_state_of_its_own_has_none_saved(kind: str) -> None:
    assert capture_random(torch.device(kind)).keys() == HOST


def test_a_state_is_restored_on_its_own_type_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    module = SimpleNamespace(
        get_rng_state=lambda _: torch.tensor([3, 4], dtype=torch.uint8),
        set_rng_state=lambda state, _: states.append(state.tolist()),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    of_xpu = capture_random(torch.device("xpu", 0))

    restore_random(of_xpu, torch.device("cuda", 0))
    assert states == [], "CUDA cannot use it"
    restore_random(of_xpu, torch.device("xpu", 1))

    assert of_xpu.keys() == {*HOST, "xpu"}
    assert states == [[3, 4]]
