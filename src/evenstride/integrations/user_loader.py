"""What integrations keep of the `DataLoader` that a script gives them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a loader that another one takes over, without torch's defaults."""
    # `pin_memory_device` is missing in some releases of torch.
    given = {name: getattr(loader, name, None) for name in _KEPT}
    return {name: value for name, value in given.items() if value}


def draws_each_once(sampler: RandomSampler, dataset: Any) -> bool:
    """Return whether a random sampler draws each sample of a data set once per epoch."""
    return not sampler.replacement and sampler.num_samples == len(dataset)
