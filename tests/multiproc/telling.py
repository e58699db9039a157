"""Training loops of ranks whose leader tells sinks and names workers."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from tests.inside import session
from tests.multiproc.training import net, rows

BATCH, FEATURES, WIDTH = 128, 256, 2048
METRICS = ("worker_share_samples", "worker_busy_seconds", "worker_wait_seconds")
_STEPS = 10  # between two looks at the file


def reported(rank: int, asked: list[str]) -> dict[str, Any]:
    """Train until Prometheus has the `METRICS`; return the sinks and what it said in the end."""
    stride = evenstride.Stride(global_batch=12, sinks=asked)
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    loader = stride.loader(rows(240))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    leader = session(stride).leader
    board = None if leader is None else leader.board
    sinks = dict(board.sinks) if isinstance(board, TelemetryBoard) else {}
    missing = 1.0
    while missing or stride.epoch < 2:  # the first exchanges may be late, and the pool has a limit
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        stride.mean(1.0, 2, name="loss")
        pages = [_page(sink.port) for sink in sinks.values() if hasattr(sink, "port")]
        missing = stride.mean(float(any(m not in page for page in pages for m in METRICS)), 1.0)
    names = [peer.name for peer in session(stride).team.peers]
    stride.close()
    return {"sinks": list(sinks), "pages": pages, "names": names}


def in_own_steps(rank: int, folder: str) -> list[int]:
    """Train asynchronously with a sink and a trace; return this rank's updates at epochs' ends."""
    stride = evenstride.Stride(
        global_batch=12, sync="asp", sinks=f"csv:{folder}/metrics.csv", trace=folder
    )
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    loader = stride.loader(rows(240))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    own, ends = 0, []
    for _ in range(3):
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            own += 1
        stride.mean(1.0, 2, name="loss")
        ends.append(own)
    stride.close()
    return ends


def _page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def burdened(rank: int, folder: str, times: int) -> dict[str, Any]:
    """Train until rank 1 is named, which does more work for each sample once all have a past."""
    log = _Log()
    logging.getLogger("evenstride").addHandler(log)
    path = Path(folder, "metrics.csv")
    stride = evenstride.Stride(global_batch=BATCH, sinks=f"csv:{path}", trace=folder)
    module = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model = stride.watch(DistributedDataParallel(module))
    torch.manual_seed(0)  # the ranks must have the same data, whatever ran in them before
    data = TensorDataset(torch.randn(64 * BATCH, FEATURES), torch.randn(64 * BATCH, 1))
    loader = stride.loader(data)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)
    since, done = 0, False
    while not done:  # the test has a deadline
        for x, y in loader:
            with torch.no_grad():
                for _ in range(times if rank == 1 and since else 0):
                    module(x)
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if stride.step % _STEPS == 0:
                known, named = _looked(path) if rank == 0 else (0, 0)
                done = bool(since) and stride.mean(float(named > since), 1.0) > 0
                since = since or int(stride.mean(float(known), float(rank == 0)))
            if done:
                break
    logging.getLogger("evenstride").removeHandler(log)
    stride.close()
    return {"since": since, "log": log.warnings}


def _looked(path: Path) -> tuple[int, int]:
    """Return the latest steps at which the sink has rank 1 up to speed, and slow in an alert.

    A burst of other processes on the machine may make it slow as well; it is named again only
    after it was up to speed.
    """
    with path.open(newline="") as file:
        reported = [row for row in csv.DictReader(file) if row["label"].endswith("/1")]
    known = any(row["metric"] == "worker_speed_ratio" and row["value"] for row in reported)
    slow = [row for row in reported if row["metric"] == "worker_slow"][-1:]
    named = [int(row["step"]) for row in reported if row["text"].startswith("slow:")]
    fast = [int(row["step"]) for row in slow if known and float(row["value"]) == 0]
    return max(fast, default=0), max(named, default=0)


class _Log(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.warnings.append(record.getMessage())
