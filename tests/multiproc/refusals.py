"""Requests that cannot be served; each returns what was raised on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import evenstride
from tests.multiproc.training import net, rows


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated."""

    def __iter__(self) -> Iterator[Any]:
        return iter([1, 2, 3])


class Endless(torch.utils.data.Dataset[Any]):
    """A data set that does not know how long it is."""

    def __getitem__(self, index: int) -> int:
        return index


def raised(ask: Callable[[], object]) -> tuple[str, str]:
    """Return type and text of what ``ask`` raises."""
    try:
        ask()
    except evenstride.EvenstrideError as error:
        return type(error).__name__, str(error)
    return "", ""


def settings(rank: int, by_rank: list[dict[str, Any]]) -> tuple[str, str]:
    """Make a Stride with this rank's settings."""
    strides: list[evenstride.Stride] = []
    answer = raised(lambda: strides.append(evenstride.Stride(**by_rank[rank])))
    for stride in strides:
        stride.close()
    return answer


def loaders(rank: int, name: str) -> tuple[str, str]:
    """Ask for a loader that cannot be."""
    stride = evenstride.Stride(global_batch=8)
    requests: dict[str, Callable[[], object]] = {
        "another length": lambda: stride.loader(rows(20 + rank)),
        "a stream": lambda: stride.loader(Stream()),
        "no length": lambda: stride.loader(Endless()),
        "empty on one rank": lambda: stride.loader(rows(20 * rank)),
        "batch_size": lambda: stride.loader(rows(20), batch_size=4),  # type: ignore[call-arg]
        "shuffle": lambda: stride.loader(rows(20), shuffle=rank == 0),
        "drop_last": lambda: stride.loader(rows(7), drop_last=True),
        "twice": lambda: [stride.loader(rows(20)) for _ in range(2)] and None,
        "evaluation batch": lambda: stride.loader(rows(20), global_batch=4),
        "other evaluation sets": lambda: stride.loader(rows(20 + rank), train=False),
    }
    kept = stride.loader(rows(20)) if name == "twice" else None
    answer = raised(requests[name])
    del kept
    stride.close()
    return answer


def loops(rank: int, name: str) -> tuple[str, str]:
    """Break the contract of the training loop, on every rank alike."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    micro = 2 if name == "micro-batches without accumulate" else None
    loader = stride.loader(rows(40), max_micro_batch=micro)
    model = stride.watch(DistributedDataParallel(net()))

    def loss(batch: Any) -> torch.Tensor:
        value: torch.Tensor = nn.functional.mse_loss(model(batch[1]), batch[2])
        return value

    def step(batch: Any) -> None:
        stride.scale(loss(batch)).backward()  # type: ignore[no-untyped-call]

    def leave_state(batch: Any) -> None:
        step(batch)
        stride.state_dict()

    breaches: dict[str, Callable[[Any], object]] = {
        "not scaled": lambda batch: loss(batch).backward(),  # type: ignore[no-untyped-call]
        "no backward": lambda batch: stride.scale(loss(batch)),
        "scaled twice": lambda batch: stride.scale(stride.scale(loss(batch))),
        "two loops": lambda _: next(iter(loader)),
        "micro-batches without accumulate": lambda batch: stride.scale(loss(batch)),
        "state in mid-step": leave_state,
        "a negative weight": lambda batch: stride.scale(loss(batch), weight=-1.0),
        "restart inside": lambda _: loader.restart(),  # type: ignore[attr-defined]
        "load inside": lambda _: stride.load_state_dict(stride.state_dict()),
    }

    def run() -> None:
        for batch in loader:
            breaches[name](batch)

    answer = raised(run)
    stride.close()
    return answer


def missing(rank: int) -> tuple[str, str]:
    """Rank 1 never makes its Stride."""
    if rank == 1:
        return "", ""
    return raised(lambda: evenstride.Stride(global_batch=8))
