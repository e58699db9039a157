"""The user's loaders: what is kept of them, and how an evaluation is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from evenstride.errors import ConfigError
from evenstride.integrations.user_loader import draws_each_once, kept_options


@dataclass(frozen=True, slots=True)
class GivenLoader:
    """A user's `DataLoader`, as far as another loader can take it over."""

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    options: dict[str, Any]  # of `torch.utils.data.DataLoader`

    @classmethod
    def of(cls, loader: object, purpose: str) -> GivenLoader:
        """Read a loader; raise `ConfigError` if it draws samples in a way of its own."""
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"the {purpose} loader is a {type(loader).__name__}, whose samples cannot be split "
                "by speed; give a torch.utils.data.DataLoader of a data set with a length"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"the {purpose} data set {type(loader.dataset).__name__} is an IterableDataset, "
                "which yields samples in an order of its own; give one with __getitem__ and __len__"
            )
        batches: Any = loader.batch_sampler
        if (own := _own_batches(loader)) is not None:
            raise ConfigError(
                f"the {purpose} loader forms its batches itself ({own}), but evenstride sets their "
                "size; give DataLoader(dataset, batch_size=..., shuffle=...) instead"
            )
        shuffle = _shuffles(loader, purpose)
        return cls(
            loader.dataset, batches.batch_size, shuffle, batches.drop_last, kept_options(loader)
        )


def _own_batches(loader: DataLoader[Any]) -> str | None:
    """Return what forms the batches of a loader in a way of its own, if something does."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return type(loader).__name__
    if loader.batch_sampler is None:
        return "batch_size=None"
    plain = type(loader.batch_sampler) is BatchSampler
    return None if plain else type(loader.batch_sampler).__name__


def _shuffles(loader: DataLoader[Any], purpose: str) -> bool:
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if type(sampler) is SequentialSampler:
        return False
    # A subclass may draw in another way.
    if type(sampler) is RandomSampler and draws_each_once(sampler, loader.dataset):
        return True
    raise ConfigError(
        f"the {purpose} loader has a sampler of its own ({type(sampler).__name__}), but evenstride "
        "draws each sample once per epoch over all ranks; use shuffle=True or False, and "
        "torch.utils.data.Subset to choose samples"
    )


class EvenBatches(Sampler[list[int]]):
    """This rank's batches of an evaluation, in the order of the data set.

    Over all ranks each sample comes once, without padding. All ranks have the same number of
    batches, and a fast rank has larger ones: code in ``validation_step`` may communicate.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int,
        world_size: int,
        shares: Callable[[], Sequence[int]],  # in proportion to speed, equal on all ranks
    ) -> None:
        if length < world_size:
            raise ConfigError(
                f"an evaluation data set has {length} sample(s) for {world_size} ranks, and a rank "
                "without one would not take part in what the others log; use fewer devices or "
                "more samples"
            )
        self._length, self._rank, self._world_size, self._shares = length, rank, world_size, shares
        self._steps = min(-(-length // (batch_size * world_size)), length // world_size)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        shares = self._shares() or (1,) * self._world_size
        starts = [self._length * step // self._steps for step in range(self._steps + 1)]
        for start, stop in pairwise(starts):
            ends = self._ends(stop - start, shares)
            yield list(range(start + ends[self._rank], start + ends[self._rank + 1]))

    def _ends(self, samples: int, shares: Sequence[int]) -> list[int]:
        """Return the boundaries of the ranks' parts; each part has a sample."""
        total = sum(shares)
        ends = [0, *(samples * share // total for share in accumulate(shares))]
        if any(first == last for first, last in pairwise(ends)):
            return [samples * rank // self._world_size for rank in range(self._world_size + 1)]
        return ends


def evaluation_loader(
    loader: DataLoader[Any], rank: int, world_size: int, shares: Callable[[], Sequence[int]]
) -> DataLoader[Any]:
    """Return a loader of this rank's part of an evaluation data set."""
    given = GivenLoader.of(loader, "evaluation")
    batches = EvenBatches(len(given.dataset), given.batch_size, rank, world_size, shares)
    return DataLoader(given.dataset, batch_sampler=batches, **given.options)


def map_style(loader: object) -> bool:
    """Return whether a loader has a data set with indices."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
