"""A server's part of the parameters, without communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evenstride.runtime.parameter_server.server import (
    Server,
    Shard,
    mean_of,
    parameters_of,
    part_of,
    settings_of,
)


def _trained(kind: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a net and its optimizer of two groups, after a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    first, *rest = net.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": rest}]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.1, **settings)
    _step(net, optimizer)
    return net, optimizer


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 3).double()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {}), ("SGD", {})],
)
def test_a_part_continues_from_the_optimizers_state(kind: str, settings: dict[str, Any]) -> None:
    net, optimizer = _trained(kind, **settings)
    mine = [list(net.parameters())[i] for i in (0, 2)]
    shard = Shard()
    shard.begin(0, part_of(optimizer, mine), [0, 2])

    net(torch.ones(2, 3).double()).square().sum().backward()
    gradients = [p.grad.clone() for p in mine if p.grad is not None]
    scaled = [{**group, "lr": group["lr"] / 10} for group in settings_of(optimizer)]
    for group in optimizer.param_groups:
        group["lr"] /= 10
    stepped = shard.step(0, scaled, gradients)
    optimizer.step()

    assert [w.tolist() for w in stepped] == [p.tolist() for p in mine]
    assert shard.version == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("SGD", {"momentum": 0.9, "weight_decay": 0.1}), ("Adam", {}), ("AdamW", {})],
)
def test_a_smaller_step_is_one_of_smaller_learning_rates(
    kind: str, settings: dict[str, Any]
) -> None:
    net, optimizer = _trained(kind, **settings)
    shard = Shard()
    shard.begin(0, part_of(optimizer, list(net.parameters())), range(4))

    for factor in (0.25, 1):
        net(torch.ones(2, 3).double()).square().sum().backward()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        stepped = shard.step(0, settings_of(optimizer), gradients, factor)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        assert [w.tolist() for w in stepped] == [p.tolist() for p in net.parameters()]


def test_a_part_shares_no_memory_with_its_source() -> None:
    net, optimizer = _trained("SGD", momentum=0.9)
    before = [p.tolist() for p in net.parameters()]
    part = part_of(optimizer, list(net.parameters()))

    with torch.no_grad():
        for parameter in parameters_of(part):
            parameter.zero_()
            part.state[parameter]["momentum_buffer"].zero_()

    assert [p.tolist() for p in net.parameters()] == before
    assert all(bool(s["momentum_buffer"].any()) for s in optimizer.state.values())


def test_the_first_worker_sends_the_weights() -> None:
    (_, first), (net, second) = _trained("SGD"), _trained("Adam")
    shard = Shard()

    shard.begin(0, part_of(first, parameters_of(first)), range(4))
    shard.begin(0, part_of(second, list(net.parameters())), range(4))

    expected = [p.tolist() for p in parameters_of(first)]
    assert [w.tolist() for w in shard.weights(0)] == expected


def test_weights_have_keys_and_come_from_the_latest_optimizer() -> None:
    (net, first), (_, second) = _trained("SGD"), _trained("Adam")
    one, two, *_ = net.parameters()
    shard = Shard()
    shard.begin(0, part_of(first, [one, two]), [5, 3])
    shard.begin(1, part_of(second, parameters_of(second)[:1]), [5])

    found = {key: weights.tolist() for key, weights in shard.all_weights().items()}

    assert found == {5: parameters_of(second)[0].tolist(), 3: two.tolist()}


def test_a_missing_gradient_counts_as_zero() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])

    mean = mean_of([[one, None, None], [two, two, None], [one, None, None]])

    assert mean[0] is not None
    assert mean[1] is not None
    assert mean[0].tolist() == pytest.approx([5 / 3, 10 / 3])
    assert mean[1].tolist() == [1.0, 2.0]
    assert mean[2] is None
    assert one.tolist() == [1.0, 2.0], "what was pushed is not overwritten"


def test_a_step_waits_for_all_workers_and_sums_in_their_order() -> None:
    ends = []
    for order in ((0, 1, 2), (2, 0, 1)):
        net, optimizer = _trained("SGD")
        server = Server(workers=3)
        server.begin(0, part_of(optimizer, list(net.parameters())), range(4))
        settings, futures = settings_of(optimizer), list[Any]()
        for worker in order:
            torch.manual_seed(worker)
            gradients = [torch.randn_like(p) / 3**worker for p in parameters_of(optimizer)]
            assert not any(future.done() for future in futures)
            futures.append(server.push(0, worker, settings, gradients))
        assert all(future.done() for future in futures)
        weights, squared = futures[0].value()
        assert squared is None, "norms were not asked for"
        ends.append([w.tolist() for w in weights])
    assert ends[0] == ends[1]


def test_one_worker_that_measures_gives_all_the_norm_of_the_mean() -> None:
    net, optimizer = _trained("SGD")
    server = Server(workers=2)
    server.begin(0, part_of(optimizer, list(net.parameters())), range(4))
    first, *rest = parameters_of(optimizer)
    ones: list[Any] = [torch.ones_like(first), *[None for _ in rest]]
    threes: list[Any] = [3 * torch.ones_like(first), *[torch.zeros_like(p) for p in rest]]

    answers = [
        server.push(0, worker, settings_of(optimizer), gradients, worker == 1)
        for worker, gradients in enumerate((ones, threes))
    ]

    assert [answer.value()[1] for answer in answers] == pytest.approx([4.0 * first.numel()] * 2)


def test_a_failed_step_raises_on_all_workers() -> None:
    net, optimizer = _trained("SGD")
    server = Server(workers=2)
    server.begin(0, part_of(optimizer, list(net.parameters())), range(4))
    wrong = [torch.ones(1, dtype=torch.complex64)] * 4

    futures = [server.push(0, worker, settings_of(optimizer), wrong) for worker in range(2)]

    for future in futures:
        with pytest.raises(RuntimeError):
            future.value()


def test_it_is_deserted_when_all_have_left() -> None:
    server = Server(workers=2)

    server.leave(1)
    server.leave(1)
    assert not server.deserted.is_set()
    server.leave(0)
    assert server.deserted.is_set()
