"""A worker without samples contributes exactly nothing, whatever its loss turns out to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenstride.runtime.loss.training_step import ZeroShares, silence, zero_loss

LOSSES = [2.5, 0.0, float("inf"), float("-inf"), float("nan")]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("value", LOSSES)
def test_the_loss_of_a_ghost_is_exactly_zero(value: float) -> None:
    loss = torch.tensor(value, requires_grad=True)

    silent = zero_loss(loss)

    assert silent.item() == 0.0
    assert silent.requires_grad, "its backward pass still drives the collectives"


@pytest.mark.parametrize("known", [True, False], ids=["the watched model", "the graph alone"])
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 0.0])
def test_its_gradients_are_exactly_zero_and_all_there(poison: float, known: bool) -> None:
    model = _model()
    x = torch.full((1, 2), poison)  # not finite already in the activations
    loss = zero_loss(model(x).square().mean() / torch.zeros(()))

    silence(loss, [model] if known else [])
    loss.backward()  # type: ignore[no-untyped-call]

    gradients = _gradients(model)
    assert len(gradients) == 4
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_without_silencing_such_a_loss_would_poison_the_gradient() -> None:
    model = _model()
    zero_loss(model(torch.full((1, 2), torch.inf)).square().mean()).backward()  # type: ignore[no-untyped-call]

    assert not all(torch.isfinite(g).all() for g in _gradients(model))


def test_gradients_that_were_accumulated_before_are_kept() -> None:
    model = _model()
    model(torch.ones(1, 2)).mean().backward()
    before = [g.clone() for g in _gradients(model)]
    loss = zero_loss(model(torch.ones(1, 2)).mean() * torch.nan)

    silence(loss, [model])
    loss.backward()  # type: ignore[no-untyped-call]

    assert all(map(torch.equal, _gradients(model), before))


def test_it_lasts_until_the_handles_are_removed() -> None:
    model = _model()
    loss = zero_loss(model(torch.ones(1, 2)).mean())
    handles = silence(loss, [model])
    loss.backward()  # type: ignore[no-untyped-call]

    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2)).mean().backward()

    assert all(g.abs().sum() > 0 for g in _gradients(model))


@pytest.mark.parametrize("known", [True, False])
def test_frozen_parameters_are_left_alone(known: bool) -> None:
    model = _model()
    frozen: nn.Module = model[0]
    frozen.requires_grad_(False)
    loss = zero_loss(model(torch.ones(1, 2)).mean())

    handles = silence(loss, [model] if known else [])
    loss.backward()  # type: ignore[no-untyped-call]

    assert len(handles) == 2
    assert all(p.grad is None for p in frozen.parameters())


def test_gradients_from_outside_of_the_scaled_loss_are_kept() -> None:
    model = _model()
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = zero_loss(model(torch.ones(1, 2)).mean())

    silence(loss, [model])
    (loss + penalty).backward()  # type: ignore[no-untyped-call]

    assert all(torch.equal(p.grad, 2 * p) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


def test_all_watched_models_are_silenced_and_what_else_the_loss_reaches() -> None:
    one, other, third = _model(), _model(), _model()
    poison = torch.full((1, 2), torch.inf)
    loss = zero_loss(one(poison).mean() + third(poison).mean())

    silence(loss, [one, other])
    loss.backward()  # type: ignore[no-untyped-call]
    other(poison).mean().mul(0).backward()

    for model in (one, other, third):
        assert all(torch.equal(g, torch.zeros_like(g)) for g in _gradients(model))


def test_a_ghost_is_silent_until_its_next_batch() -> None:
    model, poison = _model(), torch.full((1, 2), torch.inf)
    ghosts = ZeroShares([model])

    ghosts.silent(model(poison).mean()).backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in _gradients(model))

    ghosts.end()
    model(poison).mean().backward()
    assert not all(torch.isfinite(g).all() for g in _gradients(model))
