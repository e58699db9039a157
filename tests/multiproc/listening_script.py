"""A training script that notes where it and the processes around it listen.

listening_script.py FOLDER SYNC [GATE]: trains for two steps; then each rank writes the listening
sockets of itself, its children (parameter servers) and its parent (the launcher's agent), and waits
for a byte from the named pipe GATE, if one is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride


def listening() -> list[tuple[str, int]]:
    """Return address and port of each socket on which this process and those around it listen."""
    me = psutil.Process()
    around = [me, *me.children(recursive=True), *filter(None, [me.parent()])]
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in around
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def main(folder: Path, sync: str, gate: str = "") -> None:
    """Train, and note it."""
    dist.init_process_group("gloo")
    rank = int(os.environ.get("_EVENSTRIDE_LAB_WORKER") or dist.get_rank())
    dataset = TensorDataset(torch.arange(16.0).reshape(8, 2))
    stride = evenstride.Stride(global_batch=4, sync=sync, policy="uniform")
    model: nn.Module = nn.Linear(2, 1)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    model = stride.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in stride.loader(dataset):
        stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    path = folder / f"listening-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(listening()))
    path.with_suffix(".part").rename(path)
    if gate:
        os.read(os.open(gate, os.O_RDONLY), 1)
    dist.barrier()
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
