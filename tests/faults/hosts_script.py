"""Training on hosts that come and go: ``hosts_script.py FOLDER``, until FOLDER/last is there.

Each rank notes what it is about to train; the leader writes weights and epochs at the end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.faults.elastic_script import BATCH, PER_EPOCH, net, optimizer_of, rows, weights

EVERY = 20


def must_end(folder: Path) -> bool:
    """Return whether this epoch was the last; the leader looks, all know."""
    last = torch.tensor([float((folder / "last").exists())])
    dist.broadcast(last, 0)
    return bool(last)


def main(folder: Path) -> None:
    """Train until a file asks for the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = [uuid.uuid4().hex]
    dist.broadcast_object_list(ids)
    rank, host = dist.get_rank(), socket.gethostname()
    stride = evenstride.Stride(BATCH)
    loader = stride.loader(rows())
    inner = net()
    model = stride.watch(DistributedDataParallel(inner))
    optimizer = optimizer_of(inner)
    checkpoint = evenstride.Checkpointer(
        folder / "checkpoints", stride, model=model, optimizer=optimizer, every=EVERY
    )
    checkpoint.restore()
    os.nice(10)  # it goes on until those who start again are there, and lets them go first
    place = {"generation": ids[0], "rank": rank, "world": dist.get_world_size(), "host": host}
    place["began_s"] = time.time()
    with (folder / f"audit-{ids[0]}-{rank}.jsonl").open("a") as audit:
        while not (stride.step % PER_EPOCH == 0 and must_end(folder)):
            epoch = stride.epoch
            for samples, x, y in loader:
                trained = samples.tolist() if stride.samples else []
                line = {**place, "step": stride.step + 1, "epoch": epoch, "ids": trained}
                print(json.dumps(line), file=audit, flush=True)
                stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
    if rank == 0:
        aside = folder / "end.new"
        aside.write_text(json.dumps({"weights": weights(inner), "epochs": stride.epoch}))
        aside.replace(folder / "end.json")
    checkpoint.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
