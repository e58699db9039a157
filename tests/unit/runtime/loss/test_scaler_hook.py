"""What hears of a gradient scaler's updates, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstride.runtime.loss.step_hooks import register_scaler_update_hook


class Own(torch.amp.GradScaler):
    """A scaler that updates in its own way, without asking the one it is made of."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Do nothing."""


class Special(Own):
    """One that asks it."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Do what the other does."""
        super().update(new_scale)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Own, Special])
def test_every_scaler_is_heard_until_the_hook_is_removed(kind: Any) -> None:
    heard: list[int] = []
    scaler = kind("cpu", enabled=False)
    handle = register_scaler_update_hook(lambda: heard.append(1))

    scaler.update()
    assert heard

    handle.remove()
    heard.clear()
    scaler.update()
    assert not heard


def test_an_update_is_wrapped_only_once() -> None:
    handles = [register_scaler_update_hook(lambda: None) for _ in range(2)]
    first = torch.amp.GradScaler.update
    handles.append(register_scaler_update_hook(lambda: None))

    assert torch.amp.GradScaler.update is first
    assert first.__name__ == "update"
    for handle in handles:
        handle.remove()


def test_a_scaler_works_as_before_with_a_hook() -> None:
    heard: list[float] = []
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = register_scaler_update_hook(lambda: heard.append(scaler.get_scale()))

    scaler.scale((weight * torch.tensor([1.0, torch.inf])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update(new_scale=16.0)
    handle.remove()

    assert heard == [2.0, 16.0]
    assert weight.tolist() == [1.0, 1.0]
