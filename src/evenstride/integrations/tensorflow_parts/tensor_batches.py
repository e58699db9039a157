"""Training data as TensorFlow users have it: arrays, `tf.data`, and batches of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from evenstride.errors import ConfigError
from evenstride.runtime.loading.streams import Stream


class ArrayRows:
    """Arrays of equally many rows, as a data set whose samples are the rows.

    Args:
        arrays: An array, or arrays in a tuple or dictionary, which may be nested. `numpy.memmap`
            is read on demand.

    Raises:
        ConfigError: The arrays have different numbers of rows.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = tf.nest.map_structure(_array, arrays)
        lengths = {len(array) for array in tf.nest.flatten(self._arrays)}
        if len(lengths) != 1:
            raise ConfigError(
                f"the arrays of the data set have different numbers of rows: {sorted(lengths)}; "
                "each must have one row per sample"
            )
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return tf.nest.map_structure(lambda array: array[index], self._arrays)

    def __getitems__(self, indices: list[int]) -> Any:
        return tf.nest.map_structure(lambda array: array[indices], self._arrays)


def is_arrays(data: Any) -> bool:
    """Return whether the data are arrays, alone or in a tuple or dictionary, nested or not."""
    # A list at the top is a data set of samples, which may be arrays.
    parts = tf.nest.flatten(data) if isinstance(data, tuple | dict) else [data]
    return bool(parts) and all(map(_is_array, parts))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | tf.Tensor) and value.ndim > 0


def _array(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else np.asarray(value)


def as_given(batch: Any) -> Any:
    """Return a batch that is one already."""
    return batch


def stack(samples: list[Any]) -> Any:
    """Return a batch of samples, with an array in the place of each of their values."""
    return tf.nest.map_structure(lambda *values: np.stack([*map(np.asarray, values)]), *samples)


def stream_of(dataset: Any) -> Stream:
    """Return a `tf.data.Dataset` of samples as a stream.

    Raises:
        ConfigError: It is split or batched already, or its order changes with each reading.
    """
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise ConfigError(
            "the data set is a DistributedDataset, which a strategy has split into equal batches; "
            "give the tf.data.Dataset itself, without batch() and shard()"
        )
    for stage in _stages(dataset):
        if (problem := _problem(stage)) is not None:
            raise ConfigError(f"the tf.data.Dataset {problem}")
    length = int(dataset.cardinality())
    return Stream(
        lambda _, skip: dataset.skip(skip).as_numpy_iterator(),
        length=length if length >= 0 else None,
    )


def _stages(dataset: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline from its end to its start, as far as they see samples."""
    yield dataset
    earlier = dataset._inputs()
    if _is_choice(dataset):  # the first input only says which of the others is next
        earlier = earlier[1:]
    if "Unbatch" not in type(dataset).__name__:
        for one in earlier:
            yield from _stages(one)


def _is_choice(stage: Any) -> bool:
    return "DirectedInterleave" in type(stage).__name__


def _problem(stage: Any) -> str | None:
    name = type(stage).__name__
    if "Batch" in name and "Unbatch" not in name:
        return (
            "is batched already, but each worker's batch has its own size; leave batch() out, or "
            "add unbatch() after it. evenstride forms the batches"
        )
    if "Shard" in name:
        return (
            "has a shard() for each worker, but evenstride gives each sample to one worker; leave "
            "shard() out, so that every worker reads the same data set"
        )
    if "Shuffle" in name and (getattr(stage, "_reshuffle_each_iteration", True) or _is_open(stage)):
        return (
            "shuffles in an order that differs between workers and readings; leave shuffle() out "
            "and give evenstride.Stream(lambda epoch, skip: dataset.shuffle(10_000, seed=epoch)."
            "skip(skip).as_numpy_iterator()), or shuffle(..., reshuffle_each_iteration=False) with "
            "a seed"
        )
    return _random_order(stage)


def _random_order(stage: Any) -> str | None:
    by = [*_stages(stage._inputs()[0])] if _is_choice(stage) else [stage]
    if any("Random" in type(one).__name__ and _is_redrawn(one) for one in by):
        return (
            "draws at random, and otherwise on each worker and in each reading; give "
            "sample_from_datasets() or random() a seed and rerandomize_each_iteration=False"
        )
    if getattr(stage, "_deterministic", "") == "false" or stage.options().deterministic is False:
        return (
            "has deterministic=False, so the order of its samples differs between workers and "
            "readings; leave it out"
        )
    return None


def _is_redrawn(stage: Any) -> bool:
    return _is_open(stage) or getattr(stage, "_rerandomize", False) is True


def _is_open(stage: Any) -> bool:
    """Return whether a stage has no seed, neither its own nor that of `tf.random.set_seed`."""
    # TensorFlow draws a seed for itself if both parts are 0.
    return not any(int(getattr(stage, part, 0)) for part in ("_seed", "_seed2"))


def spec_of(batch: Any) -> Any:
    """Return the `tf.TensorSpec` of batches of any size like a given one."""

    def spec(value: Any) -> Any:
        return tf.TensorSpec([None, *np.shape(value)[1:]], tf.convert_to_tensor(value).dtype)

    return tf.nest.map_structure(spec, batch)
