"""Hugging Face Accelerate, as in its quick tour."""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from benchmarks.peers.peer_worker import PeerJob, work
from torch.utils.data import DataLoader


def train(job: PeerJob) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        job.net,
        job.optimizer(job.net.parameters()),
        DataLoader(job.data, batch_size=job.size, shuffle=True),
    )
    while True:
        for ids, x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            job.note(ids, loss)


if __name__ == "__main__":
    work(train)
