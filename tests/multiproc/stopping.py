"""Training that is saved between two steps, stopped, and goes on: what each rank does."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

import evenstride
from tests.multiproc.training import net, rows, weights


def stopped(
    rank: int, sync: str, folder: str, stop: int | None
) -> tuple[int | None, int, list[float]]:
    """Return the step that was restored, the last one, and the weights at the end.

    Args:
        rank: of this process.
        sync: mode of synchronisation.
        folder: of the checkpoints, which are saved every 5 steps.
        stop: the step to stop after; ``None`` for the end of the third epoch.
    """
    del rank
    stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
    loader, module = stride.loader(rows(200)), net()
    model = stride.watch(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    checkpoint = evenstride.Checkpointer(folder, stride, model=module, optimizer=optimizer, every=5)
    restored = checkpoint.restore()
    while stride.epoch < 3 and stride.step != stop:
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if stride.step == stop:
                break
    checkpoint.close()
    stride.close()
    return None if restored is None else restored.step, stride.step, weights(module)


def left(rank: int, sync: str, stop: int) -> list[str]:
    """Return the warnings of a run that is closed after a step, without a checkpoint.

    Args:
        rank: of this process.
        sync: mode of synchronisation.
        stop: the step; an epoch has 7.
    """
    del rank
    reported = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        stride = evenstride.Stride(global_batch=30, policy="static:7,23", sync=sync)
        patch.setattr(
            logging.getLogger("evenstride"), "warning", lambda text, *a: reported.append(text % a)
        )
        loader, module = stride.loader(rows(200)), net()
        model = stride.watch(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        while stride.step != stop:
            for _, x, y in loader:
                stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if stride.step == stop:
                    break
        stride.close()
    return reported
