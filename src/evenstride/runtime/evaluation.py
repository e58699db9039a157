"""Evaluation: each sample once over all ranks, no padding, split by speed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evenstride.core.dealing import Dealing
from evenstride.core.fleet import IntArray, Shares
from evenstride.core.partition import cut, even_windows, micro_batches, step_shares
from evenstride.runtime.channel import finish, told
from evenstride.runtime.loading import BatchStream, DataLoaderOptions
from evenstride.runtime.seeding import Keys, item_seeds
from evenstride.runtime.sharded import gathered


class EvalSampler:
    """This rank's part of a data set, in the data set's own order; of shards, shard by shard.

    Args:
        length: samples in the data set.
        batch: samples per step over all ranks, at most.
        shares: returns the shares in force; called once per pass.
        rank: this rank.
        max_micro_batch: most samples per batch of this rank.
        seed: of the samples' randomness, the same in every pass; ``None`` for no seeding.
        dealing: where a pass over shards begins; ``None`` for other data.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        shares: Callable[[], Shares],
        rank: int,
        max_micro_batch: int | None,
        seed: int | None,
        dealing: Dealing | None = None,
    ) -> None:
        self._windows = even_windows(length, batch)
        self._shares, self._rank, self._seed = shares, rank, seed
        self._max_micro_batch, self._dealing = max_micro_batch, dealing

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[Keys]:
        for mine in self._of_steps(self._shares()):
            for part in micro_batches(range(len(mine)), self._max_micro_batch):
                yield self._keys(mine[part.start : part.stop])

    def _of_steps(self, shares: Shares) -> Iterator[IntArray]:
        """Yield this rank's samples of each step in which it has any."""
        dealing = self._dealing
        for step, window in enumerate(self._windows):
            of_step = step_shares(shares, len(window))
            if dealing is not None:
                dealing, mine = dealing.step(step, of_step, self._rank)
            else:
                positions = cut(window, of_step)[self._rank].positions
                mine = np.arange(positions.start, positions.stop)
            if of_step[self._rank]:
                yield mine

    def _keys(self, indices: IntArray) -> Keys:
        if self._seed is None:
            return list(indices.tolist())
        seeds = item_seeds(self._seed, 0, indices)
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))


class EvalLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a data set; ``len`` counts global steps.

    Args:
        sampler: this rank's part.
        samples: the data set.
        torch_options: for torch's loader.
        sharded: returns the models whose parameters are kept gathered during a pass, because
            ranks run them unequally often.
    """

    def __init__(
        self,
        sampler: EvalSampler,
        samples: Any,
        torch_options: DataLoaderOptions,
        sharded: Callable[[], Iterable[nn.Module]],
    ) -> None:
        self._sharded = sharded
        super().__init__(samples, batch_sampler=BatchStream(sampler), **torch_options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over this rank's batches; collective if a model is sharded."""
        with contextlib.ExitStack() as stack:
            for model in self._sharded():
                stack.enter_context(gathered(model))
            yield from super().__iter__()


def exact_mean(
    total: float | Tensor, count: float | Tensor, group: dist.ProcessGroup | None
) -> float | Tensor:
    """Return the sum of all ranks' totals over the sum of their counts; collective.

    Summed in float64. A tensor of several elements gives a tensor of the same shape, anything
    else a float. With a count of 0 over all ranks the result is nan.
    """
    totals = torch.as_tensor(total, dtype=torch.float64, device="cpu").detach()
    sums = torch.cat([totals.reshape(-1), torch.tensor([float(count)], dtype=torch.float64)])
    if group is not None:
        sums = _summed(sums.to(_device(group)), group)
    mean = sums[:-1] / sums[-1]
    return float(mean) if totals.numel() == 1 else mean.reshape(totals.shape)


def _summed(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    rank = dist.get_rank(group)
    if sums.is_cuda:
        with told(rank, "mean()"):
            dist.all_reduce(sums, group=group)
            return sums.cpu()
    work = dist.all_reduce(sums, group=group, async_op=True)
    assert work is not None, "this rank is in the group"
    finish(work, rank, "mean()")
    return sums


def _device(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
