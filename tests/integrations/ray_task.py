"""What the workers of Ray Train train in tests, and what one process comes to in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.multiproc.training import flat, net, rows, weights
from tests.order import epoch_order

SAMPLES, PER_WORKER, EPOCHS = 44, 5, 2
BATCH = 2 * PER_WORKER
STEPS_IN_EPOCH = -(-SAMPLES // BATCH)
STEPS = EPOCHS * STEPS_IN_EPOCH


def data_loader() -> DataLoader[Any]:
    """Return the loader of a script, as it is before evenstride."""
    return DataLoader(rows(SAMPLES), batch_size=PER_WORKER, shuffle=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def orders() -> list[list[int]]:
    """Return the samples of each step, over all workers."""
    return [
        order[first : first + BATCH].tolist()
        for epoch in range(EPOCHS)
        for order in [epoch_order(0, epoch, SAMPLES, shuffle=True)]
        for first in range(0, SAMPLES, BATCH)
    ]


def alone() -> dict[str, Any]:
    """Return gradients of each step, final weights and loss of one process on the same samples."""
    module, data, gradients, loss = net(), rows(SAMPLES), [], torch.zeros(())
    optimizer = optimizer_of(module)
    for ids in orders():
        _, x, y = data[ids]
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "weights": weights(module), "loss": loss.item()}


def trained(
    stride: Any,
    loader: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int = EPOCHS,
) -> Iterator[dict[str, Any]]:
    """Train to the end; yield what each step came to on this worker, after its optimizer step."""
    for epoch in range(stride.epoch, epochs):
        loader.sampler.set_epoch(epoch)
        for ids, x, y in loader:
            loss = F.mse_loss(model(x), y)
            stride.scale(loss).backward()
            gradient = flat(model)
            optimizer.step()
            optimizer.zero_grad()
            yield {
                "step": stride.step,
                "ids": ids.tolist(),
                "gradient": gradient,
                "loss": loss.item(),
            }


def note(file: Path, one: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(one) + "\n")


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
