"""Training loops of ranks whose leader tells sinks and names workers."""

from __future__ import annotations

import csv
import logging
import os
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.lab.limits import Limits, open_limits
from tests.multiproc.training import net, rows

BATCH, FEATURES = 128, 256
# So many looks at the file, of so many steps each, before a run is given up.
_LOOKS, _STEPS = 400, 10


def told(rank: int, asked: list[str]) -> dict[str, Any]:
    """Train a little with some sinks; return what is there in the end and what Prometheus said."""
    stride = evenstride.Stride(global_batch=12, sinks=asked)
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    loader = stride.loader(rows(240))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(2):
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        stride.mean(1.0, 2, name="loss")
    leader = stride._member._team.leader
    sinks = {} if leader is None else dict(leader.board._sinks)
    pages = [_page(sink.port) for sink in sinks.values() if hasattr(sink, "port")]
    names = [peer.name for peer in stride._member._team.peers]
    stride.close()
    return {"sinks": list(sinks), "pages": pages, "names": names}


def _page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def throttled(rank: int, folder: str, speed: float) -> dict[str, Any]:
    """Train until rank 1, slowed down by a real limit on its processor time, is named."""
    log = _Log()
    logging.getLogger("evenstride").addHandler(log)
    path, pids = Path(folder, "metrics.csv"), [0, 0]
    stride = evenstride.Stride(global_batch=BATCH, sinks=f"csv:{path}", trace=folder)
    os.setpgid(0, 0)  # limits by signals are those of a process group
    module = nn.Sequential(nn.Linear(FEATURES, 1024), nn.Tanh(), nn.Linear(1024, 1))
    model = stride.watch(DistributedDataParallel(module))
    data = TensorDataset(torch.randn(64 * BATCH, FEATURES), torch.randn(64 * BATCH, 1))
    loader = stride.loader(data)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
    for other in range(2):
        pids[other] = int(stride.mean(float(os.getpid() if rank == other else 0), 0.5))
    looks = _Looks(path, pids[1], speed) if rank == 0 else None
    try:
        while stride.step < _LOOKS * _STEPS:
            for x, y in loader:
                stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if stride.step % _STEPS == 0:
                    done = looks is not None and looks.done(stride.step)
                    if stride.mean(float(done), 1.0):
                        break
            else:
                continue
            break
    finally:
        if looks is not None:
            looks.close()
        logging.getLogger("evenstride").removeHandler(log)
    stride.close()
    return {"since": looks.since if looks else 0, "step": stride.step, "log": log.warnings}


class _Log(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.warnings.append(record.getMessage())


class _Looks:
    """Looks into the file that the sink writes, and limits rank 1 once all speeds are known."""

    def __init__(self, path: Path, pid: int, speed: float) -> None:
        self._path, self._pid, self._speed = path, pid, speed
        self._limits: Limits | None = None
        self.since = 0

    def done(self, step: int) -> bool:
        """Return whether somebody was named; set the limit when the time has come."""
        with self._path.open(newline="") as file:
            told = list(csv.DictReader(file))
        if self._limits is None:
            known = {row["label"] for row in told if row["metric"] == "worker_speed_ratio"}
            if len(known) == 2:
                self._limits, _ = open_limits(2)
                self._limits.join(1, self._pid)
                self._limits.set_speed(1, self._speed)
                self.since = step
            return False
        named = [row["text"] for row in told if row["label"].endswith("/1")]
        return any(text.startswith("slow:") for text in named)

    def close(self) -> None:
        """Take the limit away."""
        if self._limits is not None:
            self._limits.close()
