"""What ranks do together between two epochs, where they do not keep step in them."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import evenstride
from tests.multiproc.evaluating import one_pass
from tests.multiproc.loops import PrescribedTimes
from tests.multiproc.training import net, rows


def evaluated_between_epochs(
    rank: int, policy: str, work: tuple[int, ...], length: int, epochs: int
) -> dict[str, Any]:
    """Return this rank's passes over a data set, one before each epoch and one at the end.

    Goes on until the shares of a dynamic policy have moved; the pool has a deadline.

    Args:
        rank: of this process.
        policy: of the split.
        work: of a sample on each rank, in units of 0.1 ms.
        length: samples of the data set that is evaluated.
        epochs: how many at least.
    """
    stride = evenstride.Stride(global_batch=24, policy=policy, sync="asp")
    PrescribedTimes(stride, 1e-4 * work[rank], step_s=1e-3)
    loader, validation = stride.loader(rows(240)), stride.loader(rows(length), train=False)
    module = net()
    model = stride.watch(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    passes, shares, trained = [one_pass(stride, validation)], set[tuple[int, ...]](), list[int]()
    while len(trained) < epochs or (
        policy == "dynamic-batching" and not stride.mean(float(len(shares) > 1), 1.0)
    ):
        mine = 0
        for ids, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            mine += len(ids)
            shares.add(stride.shares)
        passes.append(one_pass(stride, validation))
        trained.append(mine)
    stride.close()
    return {"passes": passes, "shares": shares, "trained": trained}


def saved_by_step(rank: int, folder: str, every: int | str) -> dict[str, Any]:
    """Return the warnings of a rank that saves by `Checkpointer.step` alone, and then by `save`."""
    reported = list[str]()
    stride = evenstride.Stride(global_batch=24, sync="asp")
    loader, module = stride.loader(rows(240)), net()
    model = stride.watch(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            logging.getLogger("evenstride"), "warning", lambda text, *a: reported.append(text % a)
        )
        checkpoint = evenstride.Checkpointer(
            folder, stride, model=module, optimizer=optimizer, every=every, notices="signals"
        )
        handler = signal.getsignal(signal.SIGTERM)
        for _ in range(2):
            for _, x, y in loader:
                stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
    before = len(list(Path(folder).glob("*/manifest.json")))
    checkpoint.save()
    checkpoint.close()
    stride.close()
    after = len(list(Path(folder).glob("*/manifest.json")))
    return {"reported": reported, "default": handler is signal.SIG_DFL, "saved": (before, after)}
