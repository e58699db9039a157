"""evenstride on DDP. Option ``live``: on torchft's Lighthouse, where survivors continue."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.nn.parallel import DistributedDataParallel

from evenstride import Stride
from evenstride.runtime.store.store_server import LOOPBACK

LIVE = "live"


def train(job: PeerJob) -> None:
    inner = job.optimizer(job.net.parameters())
    if job.plan.option == LIVE:
        from benchmarks.peers.torchft_peer import lighthouse

        from evenstride.integrations.torchft import LiveStride

        address = job.published("lighthouse", lighthouse)
        live = LiveStride(
            job.plan.batch, name=f"worker-{job.rank}", lighthouse=address, host=LOOPBACK
        )
        run(job, live, live.watch(job.net), live.optimizer(inner))
    dist.init_process_group("gloo")
    # For sizes that a user sets by hand, there is the fixed policy.
    policy = f"static:{','.join(map(str, job.plan.sizes))}" if job.plan.by_hand else "adaptive"
    stride = Stride(job.plan.batch, policy=policy)
    run(job, stride, stride.watch(DistributedDataParallel(job.net)), inner)


def run(job: PeerJob, stride: Any, model: Any, optimizer: Any) -> None:
    loader = stride.loader(job.data)
    while True:
        for ids, x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.note(ids[: stride.samples], loss)


if __name__ == "__main__":
    work(train)
