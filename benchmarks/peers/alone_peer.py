"""Each worker alone, without communication: its speed, measured in the same run."""

from __future__ import annotations

import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.utils.data import DataLoader


def train(job: PeerJob) -> None:
    loader = DataLoader(job.data, batch_size=job.size, shuffle=True, drop_last=True)
    optimizer = job.optimizer(job.net.parameters())
    while True:
        for ids, x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(job.net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            job.note(ids, loss)


if __name__ == "__main__":
    work(train)
