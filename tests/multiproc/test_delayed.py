"""Gradients that come one step late, on real processes and on one process that does the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import evenstride
from evenstride.testing import RankPool
from tests.multiproc.serving import Run, optimizer_of, train
from tests.multiproc.training import net, relative_error, rows, weights

CASES = {
    "two unequal shares": (2, Run("delayed")),
    "a share of 0, a bare module": (3, Run("delayed", "static:3,0,27", wrapped=False)),
    "Adam": (2, Run("delayed", optimizer="Adam")),
    "micro-batches": (2, Run("delayed", micro=4)),
    "shares that move": (2, Run("delayed", "adaptive")),
}


def alone(run: Run) -> list[list[float]]:
    """Return the weights after every step of one process that applies gradients one step late."""
    stride, module = evenstride.Stride(global_batch=30), net()
    loader, optimizer = stride.loader(rows(70)), optimizer_of(run.optimizer, module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, run.decay)
    seen, parameters = [], list(module.parameters())
    for _ in range(run.epochs):
        late: list[torch.Tensor] = []
        for number, (_, x, y) in enumerate(loader):
            loss = stride.scale(F.mse_loss(module(x), y))
            loss.backward()  # type: ignore[no-untyped-call]
            now = [p.grad.clone() for p in parameters if p.grad is not None]
            optimizer.zero_grad()
            for gradients in (late, now if number == len(loader) - 1 else []):
                for parameter, gradient in zip(parameters, gradients, strict=False):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()
            late = now
            seen.append(weights(module))
        scheduler.step()
    stride.close()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_applied_once_one_step_late(ranks: RankPool, name: str) -> None:
    world_size, run = CASES[name]

    everywhere = ranks.run(train, world_size, run)

    expected = alone(run)
    assert len(expected) == 51
    for mine in everywhere:
        assert len(mine) == len(expected)
        assert max(map(relative_error, mine, expected)) <= 1e-12
    assert everywhere[0] == everywhere[-1]


def test_it_is_not_bsp(ranks: RankPool) -> None:
    run = Run("delayed", epochs=2)

    late, exact = (ranks.run(train, 2, replace(run, sync=sync))[0] for sync in ("delayed", "bsp"))

    assert relative_error(late[1], exact[1]) > 1e-3
