"""What loaders take: torch's own options, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from evenstride.errors import ConfigError
from evenstride.runtime.loading.sample_costs import Costs
from evenstride.runtime.loading.seeding import item_seeds
from evenstride.runtime.loading.shards import Shards

_DECIDED_BY_US = ("batch_size", "sampler", "batch_sampler")


class DataLoaderOptions(TypedDict, total=False):
    """What `torch.utils.data.DataLoader` takes and we pass on unchanged."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What a training loader takes beyond torch's own.

    Args:
        shuffle: whether each epoch has a new random order.
        drop_last: whether the last, incomplete global batch is left out.
        by_epoch: whether each rank keeps to a part of the data set for a whole epoch.
        weight_fn: weight of a (micro-)batch, such as its tokens; ``None`` counts samples.
        max_micro_batch: most samples in one batch; with costs, the most one may cost.
        costs: of the samples, by which shares are dealt out; ``None`` counts samples.
        seeded: whether each sample is loaded under a seed of its own.
        cold_prefetch: whether worker processes start before the first split is found.
        sizes: global batches to use, step by step, until they end (calibration).
        check_data: whether a few samples are compared between the ranks.
    """

    shuffle: bool = True
    drop_last: bool = False
    by_epoch: bool = False
    weight_fn: Callable[[Any], float] | None = None
    max_micro_batch: int | None = None
    costs: Costs | None = None
    seeded: bool = True
    cold_prefetch: bool = False
    sizes: Iterator[int] | None = None
    check_data: bool = True


def dataset_length(dataset: Any) -> int:
    """Return the number of samples.

    Raises:
        ConfigError: the data set has no length, or no samples.
    """
    if isinstance(dataset, Shards):
        return len(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{type(dataset).__name__} gives its samples in an order of its own, so they cannot "
            "be dealt out exactly once; use a map-style data set with __getitem__ and __len__, or "
            "evenstride.Shards(lengths, read) for data that is read in a row"
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so its samples cannot be dealt out exactly "
            "once; give it a __len__"
        ) from None
    if length < 1:
        raise ConfigError(f"the {type(dataset).__name__} has no samples; give one with at least 1")
    return length


def refuse_batching(options: dict[str, Any]) -> None:
    """Raise if the caller tries to set what the loader decides itself.

    Raises:
        ConfigError: names the option, and what to use instead.
    """
    for name in _DECIDED_BY_US:
        if name in options:
            raise ConfigError(
                f"{name} cannot be set: the loader deals out the global batch of the Stride. Set "
                "Stride(global_batch=...), shuffle=, or max_micro_batch= instead"
            )
    if not options.get("in_order", True):
        raise ConfigError("in_order=False cannot be: batches must come in the order of the steps")


def check_options(options: DataLoaderOptions) -> None:
    """Raise unless torch's loader takes these options; nothing is started.

    Raises:
        ConfigError: says what torch has against them.
    """
    refuse_batching(dict(options))
    try:
        DataLoader(TensorDataset(), batch_sampler=BatchStream([[0]]), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch's DataLoader refuses these options: {error}") from None


def own_generator(seed: int, rank: int) -> torch.Generator:
    """Return the generator that seeds a loader's worker processes.

    torch would take the global one, and leave it changed. Each rank's own, because samples that
    are not seeded one by one are augmented with what the worker processes got.
    """
    own_seed = int(item_seeds(seed, 0, np.array([rank]))[0])
    return torch.Generator().manual_seed(own_seed >> 1)


class BatchStream(Sampler[list[Any]]):
    """A batch sampler whose iterators share one position; see `StepSampler`."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)
