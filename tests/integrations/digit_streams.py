"""The digits data set, written and read in the format of each streaming library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import evenstride
from evenstride.integrations.streaming_data import (
    huggingface_shards,
    mosaic_shards,
    webdataset_shards,
)
from tests.multiproc.training import flat

BATCH, LENGTH, FILES = 24, 250, 5
PER_FILE = LENGTH // FILES


def digits() -> tuple[Any, Any]:
    """Return images, ``(LENGTH, 64)`` float64, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return images[:LENGTH] / 16, labels[:LENGTH].astype(np.int64)


def files(folder: Path, suffix: str) -> list[str]:
    """Return the names of the files of a format."""
    return [str(folder / f"part-{number}.{suffix}") for number in range(FILES)]


def write_json(folder: Path) -> None:
    """Write files for Hugging Face's ``datasets``, one line per sample."""
    images, labels = digits()
    for number, name in enumerate(files(folder, "jsonl")):
        with Path(name).open("w") as lines:
            for index in range(number * PER_FILE, (number + 1) * PER_FILE):
                image, label = images[index].tolist(), int(labels[index])
                print(json.dumps({"id": index, "image": image, "label": label}), file=lines)


def write_tar(folder: Path) -> None:
    """Write tar files for WebDataset."""
    import webdataset

    images, labels = digits()
    for number, name in enumerate(files(folder, "tar")):
        with webdataset.TarWriter(name) as tar:
            for index in range(number * PER_FILE, (number + 1) * PER_FILE):
                label = int(labels[index])
                tar.write({"__key__": f"{index:06d}", "npy": images[index], "cls": label})


def write_mds(folder: Path) -> None:
    """Write shards for MosaicML Streaming."""
    from streaming import MDSWriter

    columns = {"id": "int", "image": "ndarray:float64:64", "label": "int"}
    images, labels = digits()
    with MDSWriter(out=str(folder), columns=columns, size_limit=20_000) as writer:
        for index in range(LENGTH):
            writer.write({"id": index, "image": images[index], "label": int(labels[index])})


def as_row(sample: dict[str, Any]) -> tuple[Any, ...]:
    """Return id, image and label of a sample as a mapping."""
    return sample["id"], torch.as_tensor(sample["image"], dtype=torch.float64), sample["label"]


def prepared(data: Any) -> Any:
    """Return the pipeline of a WebDataset."""
    return data.decode().to_tuple("__key__", "npy", "cls").map(_numbered)


def _numbered(row: tuple[str, Any, int]) -> tuple[int, Tensor, int]:
    return int(row[0]), torch.as_tensor(row[1]), row[2]


def tar_stream(folder: Path, epoch: int, skip: int) -> Iterator[Any]:
    """Return the rest of an epoch of all tar files, shuffled."""
    import webdataset

    data = webdataset.WebDataset(
        files(folder, "tar"), shardshuffle=False, nodesplitter=None, workersplitter=None
    )
    shuffled = data.compose(webdataset.filters.detshuffle(40, seed=epoch))
    return islice(iter(prepared(shuffled)), skip, None)


class Images(IterableDataset[tuple[int, Tensor, int]]):
    """Images in order."""

    def __iter__(self) -> Iterator[tuple[int, Tensor, int]]:
        images, labels = digits()
        for index in range(LENGTH):
            yield index, torch.as_tensor(images[index]), int(labels[index])


def write(kind: str, folder: Path) -> None:
    """Write the files that a kind of source reads."""
    writers = {"datasets": write_json, "webdataset": write_tar, "streaming": write_mds}
    writer = writers.get(kind.partition(" ")[0])
    if writer is not None:
        writer(folder)


def read_json(folder: Path) -> Any:
    """Return the written files as a streaming data set; write them if they are missing."""
    from datasets import load_dataset

    if not Path(files(folder, "jsonl")[0]).exists():
        write_json(folder)
    cache = str(folder / "cache")
    with patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        return load_dataset(
            "json",
            data_files=files(folder, "jsonl"),
            split="train",
            streaming=True,
            cache_dir=cache,
        )


def source_of(kind: str, folder: Path) -> Any:
    """Return what a loader reads."""
    if kind == "datasets by shards":
        return huggingface_shards(read_json(folder).map(as_mapping))
    if kind == "datasets":
        data = read_json(folder).shuffle(seed=3, buffer_size=60)
        return evenstride.Stream(data, transform=as_row)
    if kind == "webdataset by shards":
        return webdataset_shards(files(folder, "tar"), prepared)
    if kind == "webdataset":
        return evenstride.Stream(lambda epoch, skip: tar_stream(folder, epoch, skip))
    if kind == "streaming by shards":
        return mosaic_shards(mosaic(folder))
    from torchdata.stateful_dataloader import StatefulDataLoader

    return evenstride.Stream(StatefulDataLoader(Images(), batch_size=None))


def mosaic(folder: Path) -> Any:
    """Return MosaicML's data set of a folder; it needs the variables that torchrun sets."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with patch.dict(os.environ, variables):
        clean_stale_shared_memory()
        return StreamingDataset(local=str(folder), batch_size=4)


def as_mapping(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with its image as an array."""
    return {**sample, "image": np.asarray(sample["image"])}


def network() -> nn.Module:
    """Return a small model, the same everywhere."""
    state = torch.get_rng_state()
    torch.manual_seed(1)
    net = nn.Linear(64, 10).double()
    torch.set_rng_state(state)
    return net


def train(rank: int, kind: str, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Train on digits; return ids and gradient of every step, and the state.

    The plan's keys: policy, epochs, workers (of each rank's loader), stop, state.
    """
    stride = evenstride.Stride(BATCH, policy=plan["policy"])
    loader: Any = stride.loader(
        source_of(kind, folder), num_workers=plan.get("workers", (0,) * 8)[rank]
    )
    if plan.get("state") is not None:
        loader.load_state_dict(plan["state"])
    net = network()
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    steps: list[dict[str, Any]] = []
    while stride.epoch < plan["epochs"] and len(steps) < plan.get("stop", 10**6):
        for batch in loader:
            ids, x, y = as_row(batch) if isinstance(batch, dict) else batch
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            steps.append({"ids": ids.tolist(), "gradient": flat(net), "epoch": stride.epoch})
            optimizer.step()
            optimizer.zero_grad()
            if len(steps) == plan.get("stop"):
                break
    results = {"steps": steps, "state": loader.state_dict()}
    stride.close()
    return results


def alone_on(steps: list[list[int]]) -> list[list[float]]:
    """Return the gradients of one process, in plain PyTorch, on the given samples of each step."""
    net, (images, labels), gradients = network(), digits(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for ids in steps:
        x, y = torch.as_tensor(images[ids]), torch.as_tensor(labels[ids])
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(net))
        optimizer.step()
        optimizer.zero_grad()
    return gradients
