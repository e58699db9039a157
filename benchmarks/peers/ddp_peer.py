"""torch's DistributedDataParallel, as in its tutorial."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(job: PeerJob) -> None:
    dist.init_process_group("gloo")
    sampler: DistributedSampler[Any] = DistributedSampler(job.data)
    loader = DataLoader(job.data, batch_size=job.size, sampler=sampler)
    model = DistributedDataParallel(job.net)
    optimizer = job.optimizer(model.parameters())
    for epoch in count():
        sampler.set_epoch(epoch)
        for ids, x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            job.note(ids, loss)


if __name__ == "__main__":
    work(train)
