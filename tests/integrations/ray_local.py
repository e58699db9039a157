"""A program that torchrun starts: Ray Train's local mode, in which no cluster is needed.

    torchrun --nproc-per-node 2 -m tests.integrations.ray_local FOLDER

Each rank writes what it came to into the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from evenstride.integrations.ray import RayStride, prepare
from tests.integrations.ray_task import (
    EPOCHS,
    PER_WORKER,
    SAMPLES,
    data_loader,
    optimizer_of,
    orders,
    trained,
)
from tests.multiproc.training import flat, net, rows, weights

SHARES = (3, 7)


class Samples(IterableDataset[Any]):
    """Samples in an order of their own."""

    def __iter__(self) -> Any:
        return iter(rows(SAMPLES))


def exact(rank: int) -> dict[str, Any]:
    """Train with unequal shares, as a script does, and with an option that replaces its own."""
    options = {"collate_fn": default_collate}
    stride, loader, model = prepare(
        data_loader(), net(), policy="static:3,7", loader_options=options
    )
    optimizer = optimizer_of(model)
    restored = stride.restore(model=model, optimizer=optimizer)
    steps = list(trained(stride, loader, model, optimizer))
    stride.report({"steps": stride.step}, model=model, optimizer=optimizer)
    came = {
        "steps": steps,
        "shares": stride.shares,
        "weights": weights(model),
        "restored": restored,
        "length": len(loader),
        "samples": len(loader.dataset),
        "batch": stride.global_batch,
        "wrapped": isinstance(model, DistributedDataParallel),
    }
    stride.close()
    return came


def sharded(rank: int) -> list[float]:
    """Return the weights of a model that FSDP2 shards, trained with unequal shares."""
    mesh = init_device_mesh("cpu", (len(SHARES),))
    module = net()
    fully_shard(module, mesh=mesh)
    stride, loader, model = prepare(data_loader(), module, policy="static:3,7")
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    stride.close()
    whole = [p.full_tensor().flatten() for p in model.parameters() if isinstance(p, DTensor)]
    return [float(number) for number in torch.cat(whole)]


def streamed(rank: int) -> list[int]:
    """Return the samples of a stream that this rank trains in an epoch."""
    stream = DataLoader(Samples(), batch_size=PER_WORKER)
    stride, loader, model = prepare(stream, net(), policy="static:3,7")
    optimizer, trained_ids = optimizer_of(model), []
    for ids, x, y in loader:
        stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        trained_ids += ids.tolist()
    stride.close()
    return trained_ids


def uneven(rank: int) -> list[float]:
    """Return the gradient of the first step if a script gives unequal batches to plain DDP."""
    model = ray.train.torch.prepare_model(net())
    ids = orders()[0]
    cut = len(ids) * SHARES[0] // sum(SHARES)
    _, x, y = rows(SAMPLES)[ids[:cut] if rank == 0 else ids[cut:]]
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    return flat(model)


def refusals(rank: int) -> dict[str, str]:
    """Return the texts of what `prepare` refuses."""
    data = rows(SAMPLES)
    weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    loaders: dict[str, Any] = {
        "rows of Ray Data": iter(data),
        "a batch sampler": DataLoader(data, batch_sampler=OwnBatches(range(SAMPLES), 4, True)),
        "no batches": DataLoader(data, batch_size=None),
        "a sampler": DataLoader(data, batch_size=PER_WORKER, sampler=weighted),
        "a part": DataLoader(
            data, batch_size=PER_WORKER, sampler=RandomSampler(data, num_samples=SAMPLES // 2)
        ),
        "replacement": DataLoader(
            data, batch_size=PER_WORKER, sampler=RandomSampler(data, replacement=True)
        ),
    }
    texts = {name: refusal(partial(prepare, one, net())) for name, one in loaders.items()}
    texts["FSDP1"] = refusal(lambda: prepare(data_loader(), net(), parallel_strategy="fsdp"))
    texts["DataParallel"] = refusal(lambda: prepare(data_loader(), nn.DataParallel(net())))
    texts["every step but none"] = refusal(saving_never)
    texts["epochs from the start"] = refusal(epochs_from_the_start)
    texts["Ray's loader"] = refusal(prepared_by_ray)
    return texts


class OwnBatches(BatchSampler):
    """Batches of a script's own choice."""


def saving_never() -> None:
    stride = RayStride(8)
    try:
        stride.save_due(0)
    finally:
        stride.close()


def epochs_from_the_start() -> None:
    """Count epochs from 0 in a run that goes on in epoch 1."""
    stride, loader, model = prepare(data_loader(), net(), policy="static:3,7")
    try:
        for _ in trained(stride, loader, model, optimizer_of(model)):
            if stride.epoch:
                loader.sampler.set_epoch(0)
    finally:
        stride.close()


def prepared_by_ray() -> None:
    """Give our batches to Ray's loader, which fetches one ahead."""
    stride = RayStride(8)
    ours = stride.loader(rows(SAMPLES))
    loader = ray.train.torch.prepare_data_loader(ours, add_dist_sampler=False)
    model = stride.watch(ray.train.torch.prepare_model(net()))
    optimizer = optimizer_of(model)
    try:
        for _, x, y in loader:
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    finally:
        stride.close()


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(config: dict[str, Any]) -> None:
    """Do everything that needs no cluster, and write what it came to."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    with patch.dict(os.environ):
        came: dict[str, Any] = {
            "exact": exact(rank),
            "sharded": sharded(rank),
            "streamed": streamed(rank),
            "uneven": uneven(rank),
            "refusals": refusals(rank),
        }
    Path(config["folder"], f"rank-{rank}.json").write_text(json.dumps(came))


if __name__ == "__main__":
    torch.set_num_threads(1)
    TorchTrainer(
        train,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=0),
    ).fit()
