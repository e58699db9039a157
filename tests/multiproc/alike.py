"""Data sets that differ between ranks, and some that only seem to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import evenstride
from tests.multiproc.logs import logged
from tests.multiproc.refusals import raised
from tests.multiproc.training import Augmented, Sentences, rows

LENGTH = 24
_DESCRIPTORS = Path("/proc/self/fd")


class Table(Dataset[Any]):
    """A data set whose samples a function makes of their index."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample, self.looked = sample, 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.looked += 1
        return self.sample(index)


def _unseeded(rank: int) -> torch.Generator:
    """Return a generator as a process without a seed has it: another one on each rank."""
    return torch.Generator().manual_seed(1000 + rank)


def different(rank: int) -> dict[str, Any]:
    """Return data sets that are other ones on each rank."""
    x = torch.randn(LENGTH, 3, generator=_unseeded(rank))
    pictures = torch.randn(LENGTH, 3, 64, 64, generator=_unseeded(rank))
    mine = list(range(rank, 3 * LENGTH, 3))
    split = random_split(rows(2 * LENGTH), [LENGTH, LENGTH], generator=_unseeded(rank))
    return {
        "randn": TensorDataset(x, torch.zeros(LENGTH)),
        "noise as pictures": Table(lambda index: {"picture": pictures[index], "label": 0}),
        "random_split": split[0],
        "a part by rank": Subset(rows(3 * LENGTH), mine),
        "a part in a list": Table(lambda index: (f"text {mine[index]}", mine[index])),
        "shards": evenstride.Shards([10, 14], lambda *at: iter([(rank, *at)] * 10)),
    }


def alike(rank: int) -> dict[str, Any]:
    """Return data sets that are the same on all ranks, though not bit for bit."""
    folder = Path(tempfile.gettempdir()) / f"rank{rank}"
    noise = np.random.default_rng(rank)  # as made without a seed
    last_bit = torch.full((3, 32, 32), 1.0 + 1e-6 * rank)
    own = torch.randn(LENGTH, 4, generator=_unseeded(rank))
    return {
        "rows": rows(LENGTH),
        "augmented": Augmented(LENGTH),
        "texts of unequal length": Sentences(LENGTH),
        "paths": Table(lambda index: (folder / f"{index}.jpg", f"{folder}/{index}.jpg", index)),
        "urls": Table(lambda index: f"s3://bucket{rank}/{index}.jpg?token={rank}"),
        "pixels that round differently": Table(lambda index: last_bit * (index + 1)),
        "noise of its own": Table(lambda _: noise.random(3)),
        "the process": Table(lambda _: object()),
        "failing": Table(lambda index: [][index]),
        "local noise, not compared": TensorDataset(own),
    }


def offered(rank: int, name: str, train: bool, workers: int) -> tuple[str, str]:
    """Return what a rank hears of data that is another on each rank, with time enough to look."""
    stride = evenstride.Stride(global_batch=8)
    data = different(rank)[name]
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_BUDGET_S", "_TOO_SLOW_S"):
            patch.setattr(f"evenstride.runtime.loading.loader_agreement.{limit}", 60.0)
        answer = raised(lambda: stride.loader(data, train=train, num_workers=workers))
    stride.close()
    return answer


def accepted(rank: int, name: str) -> tuple[tuple[str, str], list[str]]:
    """Return what a rank hears, and what it is warned of, where nothing is wrong."""
    stride = evenstride.Stride(global_batch=8)
    check = "not compared" not in name
    with logged() as log:
        answer = raised(lambda: stride.loader(alike(rank)[name], check_data=check))
        stride.close()
    return answer, log


def unequal(rank: int) -> tuple[str, str]:
    """Return what a rank hears of parts that are not equally long."""
    stride = evenstride.Stride(global_batch=8)
    part = Subset(rows(LENGTH + 1), list(range(rank, LENGTH + 1, 2)))
    answer = raised(lambda: stride.loader(part))
    stride.close()
    return answer


def slightly(rank: int) -> tuple[tuple[str, str], list[str]]:
    """Return the message where one file of many is another on one rank."""
    stride = evenstride.Stride(global_batch=8)
    data = Table(lambda index: index or rank)
    with logged() as log:
        answer = raised(lambda: stride.loader(data))
        stride.close()
    return answer, log


def untouched(rank: int) -> tuple[int, bool]:
    """Return how often a data set was asked in this process, and if generators moved."""
    stride = evenstride.Stride(global_batch=8)
    data = Augmented(LENGTH)
    table = Table(data.__getitem__)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]
    stride.loader(table)
    after = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]
    stride.close()
    return table.looked, bool((before[0] == after[0]).all()) and before[1] == after[1]


def _is_ours(descriptor: Path) -> bool:
    return descriptor.exists() and descriptor.resolve() == Path(__file__).resolve()


def opened(_rank: int) -> int:
    """Return how often the file of a data set that opens it late is left open here."""
    stride = evenstride.Stride(global_batch=8)
    loader = stride.loader(Late(), num_workers=1, cold_prefetch=True)
    left = [file for file in _DESCRIPTORS.iterdir() if _is_ours(file)]
    del loader
    stride.close()
    return len(left)


class Late(Dataset[bytes]):
    """A data set that opens its file with its first sample."""

    def __init__(self) -> None:
        self.file: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = Path(__file__).open("rb")  # noqa: SIM115
        self.file.seek(index)
        read: bytes = self.file.read(8)
        return read
