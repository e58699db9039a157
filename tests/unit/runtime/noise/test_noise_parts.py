"""The gradients that the hooks on a rank's parameters see, and the removal of the hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstride.runtime.noise.noise_parts import (
    MicroBatches,
    OwnGradient,
    norm,
    square,
    square_of,
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _backward(model: nn.Module, seed: int = 0) -> Tensor:
    """Run a backward pass; return all gradients as one vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    model(x).square().mean().backward()
    return _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.fixture
def own() -> Iterator[OwnGradient]:
    """Return a rank's own gradient, all of whose time is counted."""
    spent: list[float] = []
    yield OwnGradient(spent.append)
    assert all(seconds > 0 for seconds in spent)
    assert spent


def test_the_whole_gradient_of_all_micro_batches_counts(own: OwnGradient) -> None:
    model = _model()
    own.begin(list(model.parameters()))

    _backward(model, 1)
    own.piece_ended(3.0, last=False)
    total = _backward(model, 2)
    own.piece_ended(5.0, last=True)
    found = own.end()

    assert found is not None
    assert (found.parts, found.weight) == (1, 8.0)
    assert float(found.over_weight) == pytest.approx(float(total.square().sum()) / 8, rel=1e-12)
    assert _hooks(model) == 0


def test_the_gradient_is_measured_before_the_engine_averages_it(own: OwnGradient) -> None:
    """An engine that averages in place does it after our hooks and before the end of the step."""
    model = _model()
    own.begin(list(model.parameters()))
    sent: list[Tensor] = []

    def engine(parameter: nn.Parameter) -> Any:
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def send(*_: Any) -> None:
            assert parameter.grad is not None
            sent.append(parameter.grad.clone())
            parameter.grad.zero_()

        node.register_hook(send)  # type: ignore[union-attr]
        return node

    kept = [engine(parameter) for parameter in model.parameters()]
    gradient = _backward(model)
    own.piece_ended(1.0, last=True)
    found = own.end()

    assert len(kept) == len(sent) == 4
    assert not gradient.any(), "the engine has been there"
    assert found is not None
    assert float(found.over_weight) == pytest.approx(float(square(sent)), rel=1e-12)


def test_frozen_parameters_are_ignored(own: OwnGradient) -> None:
    model = _model()
    frozen: nn.Module = model[0]
    frozen.requires_grad_(False)
    own.begin(list(model.parameters()))
    assert _hooks(model) == 2

    gradient = _backward(model)
    own.piece_ended(2.0, last=True)
    found = own.end()

    assert found is not None
    assert float(found.over_weight) == pytest.approx(float(gradient.square().sum()) / 2)


def test_a_part_without_weight_or_gradient_has_no_result(own: OwnGradient) -> None:
    model = _model()

    own.begin(list(model.parameters()))
    own.piece_ended(1.0, last=True)
    assert own.end() is None

    own.begin(list(model.parameters()))
    _backward(model)
    own.piece_ended(0.0, last=True)
    assert own.end() is None
    assert _hooks(model) == 0


def test_a_dropped_step_is_forgotten(own: OwnGradient) -> None:
    model = _model()
    own.begin(list(model.parameters()))
    _backward(model)

    own.drop()

    assert _hooks(model) == 0
    own.piece_ended(1.0, last=True)
    assert own.end() is None


def test_each_micro_batch_is_its_own_addition() -> None:
    model, parts = _model(), MicroBatches()
    parameters = list(model.parameters())
    parts.begin(parameters)

    one = _backward(model, 1)
    parts.piece_ended(3.0, last=False)
    parts.piece_ended(0.0, last=False)  # one that did not fit into memory
    two = _backward(model, 2) - one
    parts.piece_ended(5.0, last=False)
    three = _backward(model, 3) - one - two
    parts.piece_ended(2.0, last=True)
    found = parts.end()

    weighed = [(one, 3.0), (two, 5.0), (three, 2.0)]
    assert found is not None
    assert (found.parts, found.weight) == (3, 10.0)
    expected = sum(float(added.square().sum()) / weight for added, weight in weighed)
    assert float(found.over_weight) == pytest.approx(expected, rel=1e-12)


def test_a_parameter_that_only_a_later_micro_batch_reaches_counts() -> None:
    model, parts = _model(), MicroBatches()
    parts.begin(list(model.parameters()))
    last: nn.Module = model[2]

    one = last(torch.ones(1, 4, dtype=torch.float64)).mean()
    one.backward()
    first = _flat(model)
    parts.piece_ended(1.0, last=False)
    model.zero_grad()
    second = _backward(model)
    for parameter, before in zip(last.parameters(), torch.split(first, [4, 1]), strict=True):
        assert parameter.grad is not None
        parameter.grad += before.reshape(parameter.shape)
    parts.piece_ended(1.0, last=True)
    found = parts.end()

    assert found is not None
    expected = float(first.square().sum() + second.square().sum())
    assert float(found.over_weight) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("parts", [OwnGradient(lambda _: None), MicroBatches()], ids=type)
def test_gradients_do_not_change(parts: OwnGradient | MicroBatches) -> None:
    model = _model()
    parts.begin(list(model.parameters()))

    for seed in range(3):
        _backward(model, seed)
        parts.piece_ended(1.0, last=seed == 2)
    assert parts.end() is not None

    plain = _model()
    for seed in range(3):
        _backward(plain, seed)
    assert torch.equal(_flat(model), _flat(plain))


@pytest.mark.parametrize("numbers", [0, 1, 65_535, 65_536, 70_001, 3_000_001])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_norms_of_many_numbers_are_exact(dtype: torch.dtype, numbers: int) -> None:
    many = (300 * torch.randn(numbers, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = float(many.double().square().sum())
    error = {torch.float64: 1e-12, torch.float32: 3e-8}.get(dtype, 3e-7)

    assert float(square([many])) == pytest.approx(exact, rel=error)
    assert float(square_of([norm(many)])) == pytest.approx(exact, rel=error)


def test_a_gradient_in_any_layout_has_its_norm() -> None:
    gradient = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0)).t()[::2]

    assert float(square([gradient])) == pytest.approx(float(gradient.double().square().sum()))


def test_a_complex_gradient_has_both_its_parts() -> None:
    gradient = torch.tensor([3 + 4j, 1 - 2j])

    assert float(square([gradient])) == pytest.approx(30.0)
    assert float(square_of([norm(gradient)])) == pytest.approx(30.0)
