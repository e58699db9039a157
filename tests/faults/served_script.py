"""A training script over parameter servers in which a process is killed.

served_script.py FOLDER SYNC FATE STEP: rank 1 dies in its step STEP, or raises, or dies when all
are to meet; or, in rank 0's step STEP of the second epoch, its server dies, or is stopped, or
(``http``, before the first restart only) gets an HTTP request at its RPC port. Every rank writes a
line with the samples of each update once it is made; after each epoch all save. In asynchronous
training, the others wait for that in the second epoch, which they could otherwise end before.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.parameter_server import server_calls

SAMPLES, EPOCHS, BATCH = 240, 3, 12
VICTIMS = {"worker": 1, "raises": 1, "server": 0, "stopped": 0, "http": 0}


def rows() -> TensorDataset:
    """Return (id, feature) rows."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), x)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, the same everywhere, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return F.mse_loss(model(x), x[:, :1])


def meet(fate: str) -> None:
    """Kill this process, or kill or stop the server that it has started."""
    dist.distributed_c10d._get_default_store().set("fate", "")
    if fate == "worker":
        _die()
    if fate == "raises":
        raise ValueError("this worker has had enough")
    (server,) = psutil.Process().children()
    if fate == "server":
        server.kill()
        server.wait()
    elif fate == "stopped":
        server.suspend()
    elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (port,) = {c.laddr for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
        with socket.create_connection(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
        server.wait()


def await_or_meet(fate: str, rank: int, *, waits: bool, due: bool) -> None:
    """Meet a fate that is due for this rank; wait for one that comes to another."""
    victim = VICTIMS.get(fate)
    if waits and victim not in (None, rank):
        dist.distributed_c10d._get_default_store().wait(["fate"])
    if due and rank == victim:
        meet(fate)


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, sync: str, fate: str, step: int) -> None:
    """Train, save after each epoch, and note what was trained."""
    torch.set_num_threads(1)
    server_calls.SILENT_S = 2.0 if fate == "stopped" else server_calls.SILENT_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    rank = dist.get_rank()
    if fate == "early" and rank == 1:
        vars(server_calls)["join"] = _die  # after it was seen by all others
    stride = evenstride.Stride(global_batch=BATCH, sync=sync, policy="static:3,4,5")
    loader = stride.loader(rows())
    net, optimizer = trained()
    model = stride.watch(DistributedDataParallel(net))
    checkpoint = evenstride.Checkpointer(
        folder / "saved", stride, model=model, optimizer=optimizer, every=1000
    )
    restored = checkpoint.restore()
    made = 0
    with (folder / f"trained-{rank}.jsonl").open("a") as file:
        for epoch in range(stride.epoch, EPOCHS):
            for done, (ids, x) in enumerate(loader):
                stride.scale(loss_of(model, x)).backward()  # type: ignore[no-untyped-call]
                of_second = done if epoch == 1 else None
                due = (made if rank == 1 else of_second) == step
                await_or_meet(fate, rank, waits=sync == "asp" and of_second == 0, due=due)
                optimizer.step()
                optimizer.zero_grad()
                made += 1
                line = {"epoch": epoch, "ids": ids.tolist()}
                file.write(json.dumps(line) + "\n")
                file.flush()
            checkpoint.save()
    checkpoint.close()
    weights = [p.detach().tolist() for p in model.parameters()]
    summary = stride.summary()
    end = {
        "restored": None if restored is None else restored.step,
        "step": stride.step,
        "weights": weights,
        "staleness": summary.staleness,
        "text": str(summary),
    }
    (folder / f"end-{rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
