"""What is carried over from a loader that a Trainer made, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from evenstride.errors import ConfigError
from evenstride.integrations.user_loader import draws_each_once, kept_options
from evenstride.runtime.loading.loader_options import CostFn, DataLoaderOptions

_BALANCED = "BatchRebalanceSampler"


@dataclass(frozen=True, slots=True)
class Carried:
    """The data and the options of a Trainer's loader."""

    dataset: Any
    options: DataLoaderOptions
    shuffle: bool = False
    drop_last: bool = False
    costs: CostFn | None = None
    """Lengths of the samples, if the Trainer balances ranks by length."""


def carried(loader: Any, *, pins: bool, training: bool = True) -> Carried:
    """Return what a Trainer's loader has; `ConfigError` for an order that cannot be kept.

    ``pins`` is whether an accelerator exists for which memory can be pinned.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"get_train_dataloader() returned a {type(loader).__name__}, whose data set and "
            "options are unknown; return a torch DataLoader over a map-style data set"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an iterable data set and yields samples in an "
            "order of its own, so no sample can be given to another rank; use a map-style data "
            "set (of datasets: without streaming=True)"
        )
    options = DataLoaderOptions(**kept_options(loader))  # type: ignore[typeddict-item]
    options["pin_memory"] = loader.pin_memory and pins
    options["persistent_workers"] = loader.persistent_workers and training
    if not getattr(loader, "in_order", True):
        raise ConfigError(
            "dataloader_in_order=False is not possible: batches must come in step order"
        )
    if not training:
        return Carried(loader.dataset, options)
    return _ordered(loader, options)


def _ordered(loader: DataLoader[Any], options: DataLoaderOptions) -> Carried:
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # the wrapper that Accelerate splits batches with
        batches = batches.batch_sampler
    if type(batches).__name__ == _BALANCED:
        return Carried(loader.dataset, options, True, batches.drop_last, batches.lengths)
    sampler, drop_last = getattr(batches, "sampler", batches), getattr(batches, "drop_last", False)
    if isinstance(sampler, RandomSampler) and draws_each_once(sampler, loader.dataset):
        return Carried(loader.dataset, options, True, drop_last)
    if isinstance(sampler, SequentialSampler):
        return Carried(loader.dataset, options, False, drop_last)
    once = " that does not draw each sample once" if isinstance(sampler, RandomSampler) else ""
    raise ConfigError(
        f"the training loader has a {type(sampler).__name__}{once}, whose order cannot be kept: "
        "every rank gets its share of each global batch from evenstride. Use "
        'train_sampling_strategy "random", "sequential" or "batch_rebalance" (which balances ranks '
        "by length)"
    )
