"""What a data set is like: enough to notice that a checkpoint was trained on another one."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from evenstride.runtime.loading.seeding import SeededDataset, generators_kept, item_seeds
from evenstride.runtime.loading.shards import ShardReader, Shards


def describe(dataset: Any, seed: int) -> dict[str, Any]:
    """Return kind and length of a data set, and a digest of its first, middle and last sample.

    The samples are loaded under seeds of their own, so that random augmentation is the same each
    time. Samples that differ nevertheless when loaded twice, that hold anything but tensors,
    arrays, numbers and texts, or that cannot be loaded here, have no digest; neither have `Shards`.

    Args:
        dataset: that the training loader reads; ``None`` if there is no loader.
        seed: of the run.

    Cost:
        Loads three samples, twice.
    """
    while isinstance(dataset, SeededDataset):
        dataset = dataset.dataset
    if dataset is None:
        return {}
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    try:
        length = len(dataset)
    except TypeError:
        return {"kind": kind}
    told = {"kind": kind, "length": length}
    if isinstance(dataset, Shards | ShardReader) or not length:
        return told
    try:
        # Random augmentation here must not move the run's own random numbers.
        with generators_kept():
            first, second = _digest(dataset, length, seed), _digest(dataset, length, seed)
    except Exception:  # whatever a data set raises, training will meet it, or it never happens
        return told
    return {**told, "samples": first} if first == second else told


def _digest(dataset: Any, length: int, seed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    indices = np.unique(np.array([0, length // 2, length - 1]))
    for index, own in zip(indices.tolist(), item_seeds(seed, 0, indices).tolist(), strict=True):
        torch.default_generator.manual_seed(own >> 1)
        # numpy takes seeds of 32 bits only.
        np.random.seed(own & 0xFFFFFFFF)
        random.seed(own)
        _add(digest, dataset[index])
    return digest.hexdigest()


def _add(digest: Any, sample: Any) -> None:
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().resolve_conj().contiguous().flatten()
        digest.update(f"{sample.dtype}{len(sample)}".encode())
        digest.update(sample.view(torch.uint8).numpy().data)
    elif isinstance(sample, np.ndarray | np.generic):
        digest.update(f"{sample.dtype}{sample.shape}".encode())
        digest.update(np.ascontiguousarray(sample).tobytes())
    elif isinstance(sample, dict):
        for key in sample:
            _add(digest, key)
            _add(digest, sample[key])
    elif isinstance(sample, list | tuple):
        for value in sample:
            _add(digest, value)
    elif sample is None or isinstance(sample, bool | int | float | str | bytes):
        digest.update(repr(sample).encode())
    else:
        raise TypeError(type(sample).__name__)
