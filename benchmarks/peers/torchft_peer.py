"""torchft: each worker is a replica group of its own, with the settings of its README."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer
from torchft import ProcessGroupGloo as Gloo
from torchft.coordination import LighthouseServer

from evenstride.runtime.store.store_server import LOOPBACK, serve_store

JOIN_MS, TICK_MS = 10_000, 100
_lighthouses = list[Any]()  # kept for as long as the process runs


def lighthouse() -> str:
    """Start a Lighthouse in this process, and return its address."""
    server = LighthouseServer(
        bind=f"{LOOPBACK}:0", min_replicas=1, join_timeout_ms=JOIN_MS, quorum_tick_ms=TICK_MS
    )
    _lighthouses.append(server)
    return f"http://{LOOPBACK}:{server.address().rpartition(':')[2]}"


def train(job: PeerJob) -> None:
    inner = job.optimizer(job.net.parameters())

    def state() -> dict[str, Any]:
        return {"net": job.net.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        job.net.load_state_dict(saved["net"])
        inner.load_state_dict(saved["optimizer"])

    with serve_store() as (host, port):
        manager = Manager(
            pg=Gloo(timeout=timedelta(seconds=30)),
            load_state_dict=load,
            state_dict=state,
            min_replica_size=1,
            replica_id=f"worker-{job.rank}",
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=port,
            hostname=LOOPBACK,
            lighthouse_addr=job.published("lighthouse", lighthouse),
        )
        job.meet()  # the first quorum waits for all that have reported
        run(job, manager, inner)


def run(job: PeerJob, manager: Any, inner: Any) -> None:
    sampler = DistributedSampler(
        job.data, replica_rank=job.rank, num_replica_groups=job.world, group_rank=0, num_replicas=1
    )
    loader = DataLoader(job.data, batch_size=job.size, sampler=sampler)
    model, optimizer = DistributedDataParallel(manager, job.net), Optimizer(manager, inner)
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
