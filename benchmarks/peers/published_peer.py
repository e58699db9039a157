"""The algorithms of the public DBS and OmniLearn scripts, without evenstride's runtime.

As in the scripts, batches change once per epoch, each gradient is scaled by the worker's part of
the batch and summed parameter by parameter. Neither script is in a package registry, so they are
written again from their description. Two repairs: all workers take the same number of steps, and
bounds and rounding keep the batch.
"""

from __future__ import annotations

import time
from itertools import accumulate, count

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch.utils.data import DataLoader

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.policies.dynamic_batching import proportional_step

DBS = "dbs"
DEAD_BAND = 0.2  # OmniLearn's, of a worker's wanted batch
FEWEST, MOST = 0.5, 3.0  # OmniLearn's bounds, of the first batch


def next_sizes(rule: str, sizes: list[int], busy_s: list[float]) -> list[int]:
    """Return the batches of the next epoch from the workers' busy times in the last one.

    >>> next_sizes("dbs", [20, 20, 20], [1.0, 2.0, 4.0])
    [34, 17, 9]
    >>> next_sizes("omnilearn", [20, 20, 20], [1.0, 1.1, 1.2])
    [20, 20, 20]
    """
    now, times = np.array(sizes, dtype=float), np.array(busy_s)
    if rule == DBS:
        wanted = now / times
    else:
        literal = proportional_step(now, times)
        moved = np.abs(literal - now) / literal >= DEAD_BAND
        first = now.mean()
        wanted = np.clip(np.where(moved, literal, now), FEWEST * first, MOST * first)
    none = np.zeros(len(now), dtype=np.int64)
    return [int(n) for n in apportion(wanted, sum(sizes), none, none + sum(sizes))]


def train(job: PeerJob) -> None:
    dist.init_process_group("gloo")
    optimizer = job.optimizer(job.net.parameters())
    sizes, rule = list(job.plan.sizes), job.plan.option
    for epoch in count():
        busy_s = torch.tensor([one_epoch(job, optimizer, sizes, epoch)])
        every = [torch.zeros(1) for _ in sizes]
        dist.all_gather(every, busy_s)
        if not job.plan.by_hand:
            sizes = next_sizes(rule, sizes, [float(one) for one in every])


def one_epoch(
    job: PeerJob, optimizer: torch.optim.Optimizer, sizes: list[int], epoch: int
) -> float:
    """Train an epoch; return the seconds in which this worker computed."""
    rows, size, busy_s = len(job.data), sizes[job.rank], 0.0
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch)).tolist()
    # DBS cuts the data in proportion to the batches, OmniLearn into equal parts.
    weights = sizes if job.plan.option == DBS else [1] * job.world
    ends = [rows * end // sum(weights) for end in accumulate(weights, initial=0)]
    first, last = ends[job.rank], ends[job.rank + 1]
    steps, held = -(-rows // sum(sizes)), last - first
    length = held if -(-held // size) == steps else steps * size  # of the same steps as the others
    part = [order[first + at % held] for at in range(length)]
    loader = DataLoader(torch.utils.data.Subset(job.data, part), batch_size=size)
    for ids, x, y in loader:
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(job.net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        busy_s += time.perf_counter() - begun_s
        for parameter in job.net.parameters():
            assert parameter.grad is not None, "all parameters take part"
            parameter.grad *= size / sum(sizes)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        job.note(ids, loss)
    return busy_s


if __name__ == "__main__":
    work(train)
