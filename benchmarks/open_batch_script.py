"""Training script of `open_batch.py`: a transformer on text, to a loss on held-out text.

    open_batch_script.py FOLDER DATA SEED TARGET MOST_EPOCHS BATCH

``BATCH`` is a fixed batch, or the bounds of a chosen one as ``LOW-HIGH``. The script evaluates the
loss after each epoch. That time does not count. Rank 0 writes ``end.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.core.convergence.batch_efficiency import square_root

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.forecast_work import held_out_loss, text

RATE, BASE = 0.1, 128


def opened(batch: str, seed: int) -> evenstride.Stride:
    """Return a `Stride` with a fixed or a chosen batch."""
    low, dash, high = batch.partition("-")
    if dash:
        return evenstride.Stride("auto", bounds=(int(low), int(high)), seed=seed)
    return evenstride.Stride(int(batch), seed=seed)


def main() -> None:
    """Train, evaluate the loss after each epoch, and write the outcome."""
    folder, data = map(Path, sys.argv[1:3])
    seed, target, most = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = text(data)
    stride = opened(sys.argv[6], seed)
    loader = stride.loader(task.train, seeded=False)
    torch.manual_seed(seed)
    net = task.net()
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    spent_s, course, batches = 0.0, list[tuple[float, float]](), list[int]()
    while (not course or course[-1][1] > target) and stride.epoch < most:
        for group in optimizer.param_groups:
            group["lr"] = square_root(RATE, BASE, stride.global_batch)
        batches.append(stride.global_batch)
        begun_s = time.perf_counter()
        for _, x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        spent_s += time.perf_counter() - begun_s
        lost, count = held_out_loss(net, task, slice(dist.get_rank(), None, dist.get_world_size()))
        course.append((spent_s, stride.mean(lost, count)))
    if dist.get_rank() == 0:
        end = {"course": course, "batches": batches, "summary": stride.summary().to_dict()}
        (folder / "end.json").write_text(json.dumps(end))
    stride.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
