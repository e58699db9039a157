"""What ranks run that train asynchronously, and what they saw."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.runtime.parameter_server import server, server_calls
from tests.inside import session
from tests.multiproc.training import net, rows, weights


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a few epochs.

    Args:
        sync: mode of synchronisation.
        length: samples of an epoch.
        epochs: how many.
        batch: global batch.
        policy: of the split.
        work: multiplications per step on each rank, which make its speed.
        dies: rank and step at which its process is killed.
        processes: of each rank's loader.
        most_steps: limit of steps, as launchers set it.
    """

    sync: str
    length: int = 70
    epochs: int = 3
    batch: int = 12
    policy: str = "uniform"
    work: tuple[int, ...] = (0, 0, 0)
    dies: tuple[int, int] | None = None
    processes: int = 0
    most_steps: int | None = None


def passed(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a pass; none, instead of the end of the program, behind a limit."""
    with contextlib.suppress(SystemExit):
        yield from loader


def train(rank: int, run: Run) -> dict[str, Any]:
    """Return what one rank trained, epoch by epoch, and its weights at their ends."""
    torch.manual_seed(0)
    if run.most_steps is not None:
        os.environ["EVENSTRIDE_MAX_STEPS"] = str(run.most_steps)
    stride = evenstride.Stride(global_batch=run.batch, policy=run.policy, sync=run.sync)
    os.environ.pop("EVENSTRIDE_MAX_STEPS", None)
    loader = stride.loader(rows(run.length), num_workers=run.processes)
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    free = session(stride).free
    assert free is not None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    ids: list[list[list[int]]] = []
    ends, times, heavy = [], list[list[tuple[float, float]]](), torch.ones(64, 64)
    places, splits = [], []
    for epoch in range(run.epochs):
        assert run.most_steps is not None or stride.epoch == epoch
        ids.append([])
        times.append([])
        for own, x, y in passed(loader):
            begun_s = time.monotonic()
            for _ in range(run.work[rank]):
                heavy = (heavy @ heavy).clamp(-1, 1)
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            if run.dies == (rank, stride.step):
                os.kill(os.getpid(), signal.SIGKILL)
            times[-1].append((begun_s, time.monotonic()))  # one clock for all processes
            optimizer.step()
            optimizer.zero_grad()
            ids[-1].append(own.tolist())
        ends.append(weights(module))
        assert stride.mean(1.0, 1) == 1.0  # all ranks are there
        saved = stride.state_dict()
        places.append((stride.epoch, saved["epoch"], saved["position"]))
        splits.append(free.split)
        assert free.present() == tuple(range(len(free.split) or dist.get_world_size()))
    free.bring_home([optimizer])
    momentum = [optimizer.state[p]["momentum_buffer"].tolist() for p in module.parameters()]
    reported = {"ids": ids, "ends": ends, "report": free.report(), "times": times, "splits": splits}
    stride.close()
    return {**reported, "places": places, "momentum": momentum}


def idle(rank: int) -> bool:
    """Return whether a server is shown that it is needed while nothing is asked of it."""
    del rank
    every_s, vars(server_calls)["EVERY_S"] = server_calls.EVERY_S, 0.02
    stride = evenstride.Stride(global_batch=12, sync="asp")
    stride.watch(net())
    end_s, begun = time.monotonic() + 20, rpc.rpc_sync("server0", _calls)
    shown = False
    while not shown and time.monotonic() < end_s:
        shown = rpc.rpc_sync("server0", _calls) >= begun + 5
    stride.mean(1.0, 1)  # so that no rank leaves, which is a call, before all have seen it
    stride.close()
    vars(server_calls)["EVERY_S"] = every_s
    return shown


def _calls() -> int:
    """Return the calls that the server of this process has had."""
    return server.here[0].calls
