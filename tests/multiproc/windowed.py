"""Training from streams and batch functions, which every rank reads as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info

import evenstride
from tests.multiproc.loops import burn
from tests.multiproc.training import flat, net, rows

BATCH, LENGTH = 24, 250
Row = tuple[Tensor, ...]


def order(epoch: int, length: int) -> list[int]:
    """Return the order of an epoch's samples."""
    generator = torch.Generator().manual_seed(epoch)
    return list(torch.randperm(length, generator=generator).tolist())


class Rows(IterableDataset[Row]):
    """Rows in an order that depends on the epoch; loader processes share them, as usual."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        data, process = rows(self.length), get_worker_info()
        first, every = (0, 1) if process is None else (process.id, process.num_workers)
        for index in islice(order(self.epoch, self.length), first, None, every):
            yield data[index]


def with_noise(row: Row) -> Row:
    """Return a row with a random number, as augmentation would draw."""
    return (*row, torch.rand(()))


def draw(samples: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return rows drawn with replacement, and a random number for each."""
    data = rows(LENGTH)
    chosen = torch.randint(LENGTH, (samples,))
    ids, x, y = data[chosen.tolist()]
    return ids, x, {"y": y, "drawn": torch.rand(samples)}


def source_of(plan: dict[str, Any]) -> Any:
    """Return what the plan trains on."""
    length = plan.get("length", LENGTH)
    if plan.get("kind") == "function":
        return draw
    if plan.get("kind") == "bare":
        return Rows(length)
    known = length if plan.get("known") else None
    return evenstride.Stream(Rows(length), transform=with_noise, length=known)


def train(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train as ``plan`` says; return samples and gradient of every step, and the state.

    The plan's keys: kind (of source), policy, length and known (of the stream), epochs or
    max_steps, workers (of each rank's loader), micro, drop_last, weighted. The run starts from
    state, leaves the loop and enters it again after the steps in breaks, and ends after stop steps.
    """
    stride = evenstride.Stride(BATCH, policy=plan["policy"])
    loader = stride.loader(
        source_of(plan),
        num_workers=plan.get("workers", (0,) * 8)[rank],
        max_micro_batch=plan.get("micro"),
        drop_last=plan.get("drop_last", False),
        weight_fn=weigh if plan.get("weighted") else None,
        max_steps=plan.get("max_steps"),
    )
    if plan.get("state") is not None:
        stride.load_state_dict(plan["state"])
    module = net()
    model = stride.watch(DistributedDataParallel(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    steps: list[dict[str, Any]] = [{"ids": [], "drawn": []}]
    stops = (*plan.get("breaks", ()), plan.get("stop"))
    while not _over(stride, plan, len(steps) - 1):
        for ids, x, *rest in loader:
            y, *drawn = rest[0].values() if isinstance(rest[0], dict) else rest
            burn(64, 20 * len(x) * (1 + 3 * rank))  # so that an adaptive policy has work
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if stride.samples:
                steps[-1]["ids"] += ids.tolist()
                steps[-1]["drawn"] += drawn[0].tolist() if drawn else []
            if stride.synced:
                steps[-1] |= {"gradient": flat(module), "epoch": stride.epoch}
                optimizer.step()
                optimizer.zero_grad()
                steps.append({"ids": [], "drawn": []})
                steps[-2]["state"] = stride.state_dict()
                if len(steps) - 1 in stops:
                    break
    results = {"steps": steps[:-1], "state": stride.state_dict(), "summary": str(stride.summary())}
    stride.close()
    return results


def weigh(batch: Any) -> float:
    """Return the number of samples in a batch."""
    return float(len(batch[0]))


def _over(stride: evenstride.Stride, plan: dict[str, Any], steps: int) -> bool:
    done = stride.step >= plan.get("max_steps", 10**6) or steps == plan.get("stop")
    return done or stride.epoch >= plan.get("epochs", 10**6)


def evaluated(rank: int, plan: dict[str, Any]) -> list[list[Any]]:
    """Return the samples of two evaluations of a stream, and their random numbers."""
    stride = evenstride.Stride(BATCH, policy=plan["policy"])
    loader = stride.loader(
        source_of(plan),
        train=False,
        num_workers=plan.get("workers", (0, 0))[rank],
        max_micro_batch=plan.get("micro"),
    )
    passes = []
    for _ in range(2):
        seen: list[Any] = []
        for ids, _, _, drawn in loader:
            assert len(ids) <= plan.get("micro", BATCH)
            seen += zip(ids.tolist(), drawn.tolist(), strict=True)
        passes.append(seen)
    stride.close()
    return passes


class Other:
    """Samples that differ between ranks, or from one reading to the next."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank, self.own = how, rank, torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(40):
            if self.how == "split by rank":
                yield torch.tensor(2.0 * number + self.rank)
            elif self.how == "own generator":
                yield torch.rand((), generator=self.own)
            else:  # the global generators, which are seeded
                yield torch.rand(())


def refused(rank: int, how: str) -> str:
    """Return why a loader is refused; empty if it is not."""
    own = torch.Generator().manual_seed(0)

    def kept(samples: int) -> Tensor:
        return torch.rand(samples, generator=own)

    stride = evenstride.Stride(BATCH)
    try:
        if how == "function":
            stride.loader(kept)
        else:
            stride.loader(evenstride.Stream(Other(how, rank)))
    except evenstride.EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stride.close()
    return ""
