"""Token sequences of different lengths: bucketed and padded, packed into one row, or in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.training import (
    Sentences,
    flat,
    padded,
    token_loss,
    token_net,
    tokens_in,
)

BATCH, LENGTH, BLOCK, MOST = 24, 100, 8, 12
Batch = tuple[Tensor, Tensor]


def packed(samples: list[tuple[int, Tensor]]) -> Batch:
    """Return ids and all tokens in one row, without padding."""
    ids, tokens = zip(*samples, strict=True)
    return torch.tensor(ids), torch.cat(list(tokens))[None]


def blocks(_: int, skip: int) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of tokens, each filled with as many sequences as needed."""
    data, left, number = Sentences(LENGTH), torch.empty(0, dtype=torch.long), 0
    for index in range(LENGTH):
        left = torch.cat([left, data[index][1]])
        while len(left) >= BLOCK:
            if number >= skip:
                yield number, left[:BLOCK]
            left, number = left[BLOCK:], number + 1


def train(rank: int, how: str, policy: str) -> list[dict[str, Any]]:
    """Return ids, sizes of micro-batches, tokens of padding, and gradient of every step."""
    stride = evenstride.Stride(BATCH, policy=policy)
    lengths = [1 + index % 6 for index in range(LENGTH)]
    if how == "blocks":
        loader = stride.loader(evenstride.Stream(blocks))
    else:
        loader = stride.loader(
            Sentences(LENGTH),
            cost_fn=lengths,
            max_micro_batch=MOST,
            bucketed=how == "bucketed",
            collate_fn=packed if how == "packed" else padded,
            weight_fn=tokens_in,
        )
    net = token_net()
    model = stride.watch(DistributedDataParallel(net))
    steps: list[dict[str, Any]] = [{"ids": [], "sizes": [], "padding": 0}]
    for ids, tokens in loader:
        with stride.accumulate(model):
            stride.scale(token_loss(model, tokens)).backward()  # type: ignore[no-untyped-call]
        if stride.samples:
            steps[-1]["ids"] += ids.tolist()
            steps[-1]["sizes"].append(tokens.numel())
            steps[-1]["padding"] += tokens.numel() - int((tokens != 0).sum())
        if stride.synced:
            steps[-1]["gradient"] = flat(net)
            net.zero_grad()
            steps.append({"ids": [], "sizes": [], "padding": 0})
    stride.close()
    return steps[:-1]


def alone_on(how: str, ids: list[int]) -> list[float]:
    """Return the gradient of one process, in plain PyTorch, on all tokens of a step."""
    data: Any = list(blocks(0, 0)) if how == "blocks" else Sentences(LENGTH)
    tokens = torch.cat([data[i][1] for i in ids])
    net = token_net()
    F.cross_entropy(net(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    return flat(net)
