"""Random augmentation that does not depend on which worker loads a sample.

Before each ``__getitem__`` the generators of torch, numpy and Python are seeded from (seed, epoch,
index) alone. In the training process their states are restored afterwards, so that dropout and the
rest of the script draw the same random numbers as without evenstride.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from evenstride.core.sampling.permutation import GOLDEN, mix, outputs

Key = tuple[int, int]
"""A sample's index in the data set, and the seed of its randomness."""


class WindowKey(NamedTuple):
    """A sample of data that is read by whole windows, the global batches of steps."""

    epoch: int
    start: int  # first position of the window in the epoch
    stop: int  # the position after its last one
    position: int  # of the sample


Keys = list[Key] | list[int] | list[WindowKey]
"""Samples of a batch: with seeds, indices alone if no seeds are needed, or parts of a window."""


def item_seeds(
    seed: int, epoch: int, indices: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.uint64]:
    """Return a well-mixed 64-bit seed for each index, a function of the three arguments alone."""
    # SplitMix64, applied to the seed, then to the epoch, then to the index.
    seeds: npt.NDArray[np.uint64] = indices.astype(np.uint64) + _state(seed, epoch)
    mix(seeds, np.empty_like(seeds))
    return seeds


@lru_cache(maxsize=4)
def _state(seed: int, epoch: int) -> np.uint64:
    """Return the number that is added to an index: seed and epoch mixed, one step further."""
    state = outputs(np.uint64(seed % 2**64), 1) + np.uint64(epoch)
    state = outputs(state[0], 1) + GOLDEN
    return np.uint64(state[0])


def needs_no_seed(dataset: object) -> bool:
    """Return whether a data set certainly draws no random numbers, so that it needs no seeds."""
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return needs_no_seed(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(needs_no_seed, dataset.datasets))
    return False


def seeded_dataset(dataset: Any, *, seeded: bool) -> Any:
    """Return the data set with seeded items, or unchanged if seeds are not wanted or needed."""
    return SeededDataset(dataset) if seeded and not needs_no_seed(dataset) else dataset


class SeededDataset(Dataset[Any]):
    """A data set whose items are seeded one by one, by their `Key`; otherwise the data set's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        if get_worker_info() is not None:  # only this loader process uses its generators
            return [self._item(key) for key in keys]
        with generators_kept():
            return [self._item(key) for key in keys]

    def _item(self, key: Key) -> Any:
        index, seed = key
        seed_generators(seed)
        return self.dataset[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset":
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while a worker process unpickles this object
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seed_generators(seed: int) -> None:
    """Seed the three global generators, which data sets use."""
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def generator_states() -> tuple[Any, Any, Any]:
    """Return the states of the three global generators."""
    numpy_state = np.random.get_state(legacy=False)  # the second of a pair of normals included
    return torch.get_rng_state(), random.getstate(), numpy_state


def restore_generators(states: tuple[Any, Any, Any]) -> None:
    """Go back to states that `generator_states` has returned."""
    torch_state, python_state, numpy_state = states
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    torch.set_rng_state(torch_state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of the three global generators afterwards."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)
