"""Ranks of which one gets a notice, which is perhaps withdrawn."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from evenstride import Stride
from evenstride.runtime.notices import Notice
from tests.inside import session
from tests.multiproc.training import flat, net, rows


def _over(shares: list[tuple[int, ...]], going: list[Any], withdrawn: bool) -> bool:
    """Return whether all has happened that should; alike on all ranks, as all of it is."""
    if not withdrawn:
        return bool(going)
    return any(0 in split for split in shares) and 0 not in shares[-1]


def given_notice(rank: int, who: int, withdrawn: bool, saves: bool, workers: int) -> dict[str, Any]:
    """Train until a notice has been heeded; once it has, it may be withdrawn.

    One rank gets it in step 10, and lets it be withdrawn after some steps without a share.
    """
    stride = Stride(global_batch=24, policy="uniform")
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = stride.loader(rows(240), num_workers=workers)
    lifecycle = session(stride).ties.lifecycle
    if saves and rank == 0:
        lifecycle.saves.takes(0.5)
    seen: list[tuple[list[int], int, list[float]]] = []
    shares: list[tuple[int, ...]] = []
    due: list[int] = []
    going: list[Any] = []
    idle = 0
    while stride.epoch < 500 and not _over(shares, going, withdrawn):
        for ids, x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            seen.append((ids.tolist() if stride.samples else [], stride.samples, flat(model)))
            optimizer.step()
            optimizer.zero_grad()
            shares.append(stride.shares)
            step = stride.step
            if lifecycle.saves.pending(step):
                due += [step] if lifecycle.saves.due(step) else []
                gone, _ = lifecycle.saves.going(step)
                going += [(step, gone)] if gone else []
            if rank == who and step == 10:
                left_s = time.time() + 3600.0
                lifecycle.notified.changed(Notice("test", left_s, False, withdrawn, "a test"))
            idle += rank == who and not seen[-1][1]
            if idle == 5 and withdrawn and not seen[-1][1]:
                lifecycle.notified.changed(None)
    stride.close()
    return {"seen": seen, "shares": shares, "due": due, "going": going}
