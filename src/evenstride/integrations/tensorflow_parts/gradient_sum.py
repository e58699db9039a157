"""The weighted sum of gradients over the workers, in an eager step or in a `tf.function`.

In a `tf.function`, the marks of a step are operations too. They run after the gradients they
depend on, and what follows depends on them. So the time of this worker's own work ends where its
last gradient is ready, and its waiting time ends where the sum is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from evenstride.runtime.loss.outside_step import OutsideStep

_SHORT = (tf.float16, tf.bfloat16)
"""Types that are summed in float32."""


class GradientSum:
    """Sums gradients over the workers, each with its weight.

    ``group`` is a Gloo group; ``None`` if the strategy sums, or with one worker. ``replicas`` are
    those of the strategy; 1 without one.
    """

    def __init__(self, marks: OutsideStep, group: dist.ProcessGroup | None, replicas: int) -> None:
        self._marks, self._group, self._replicas = marks, group, replicas

    def over_workers(self, gradients: Sequence[Any], reduction: str) -> list[Any]:
        """Return the gradients of the global batch, with ``None`` where one is given."""
        own = [gradient for gradient in gradients if gradient is not None]
        if tf.inside_function():
            self._marks.spoil()  # tracing belongs to no step
        # A strategy sums, so a mean is divided by the replicas in a loss that is right for it:
        # Keras' losses do that by themselves.
        divided = self._replicas if reduction == "mean" else 1
        factor = _in_order(lambda: self._marks.ready(reduction) * divided, own, tf.float64)
        total = self._summed([_times(gradient, factor) for gradient in own])
        # A function runs as a whole, so nothing can come between the sum and its use.
        ends = self._ended if tf.inside_function() else self._marks.summed
        whole = iter(_after(_in_order(lambda: ends() or 0.0, total, tf.float64), total))
        return [None if gradient is None else next(whole) for gradient in gradients]

    def applied(self) -> None:
        """Mark that an eager step has updated the weights."""
        if not tf.inside_function():
            self._marks.applied()

    def _ended(self) -> None:
        self._marks.summed()
        self._marks.applied()

    def _summed(self, gradients: list[Any]) -> list[Any]:
        if self._replicas > 1:
            context = tf.distribute.get_replica_context()
            return list(context.all_reduce(tf.distribute.ReduceOp.SUM, gradients))
        if self._group is None:
            return gradients
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        wide = [tf.cast(one, tf.float32) if one.dtype in _SHORT else one for one in dense]
        total = tf.numpy_function(self._all_reduce, wide, [one.dtype for one in wide])
        for one, of in zip(total, dense, strict=True):
            one.set_shape(of.shape)
        return [tf.cast(one, of.dtype) for one, of in zip(total, dense, strict=True)]

    def _all_reduce(self, *arrays: Any) -> list[Any]:
        total: list[Any] = list(arrays)
        for dtype in sorted({array.dtype for array in arrays}, key=str):
            places = [at for at, array in enumerate(arrays) if array.dtype == dtype]
            whole = torch.from_numpy(np.concatenate([arrays[at].reshape(-1) for at in places]))
            dist.all_reduce(whole, group=self._group)
            ends = np.cumsum([arrays[at].size for at in places])[:-1]
            for at, part in zip(places, np.split(whole.numpy(), ends), strict=True):
                total[at] = part.reshape(arrays[at].shape)
        return total


def _in_order(mark: Callable[[], float], after: list[Any], dtype: Any) -> Any:
    """Call a function once some tensors are computed, and return its result."""
    values = [_values(tensor) for tensor in after]
    if not tf.inside_function():
        # On a device, an operation may still run when it has returned; copying a value waits.
        if values:
            _probe(values).numpy()
        return tf.constant(mark(), dtype)
    with tf.control_dependencies(values):
        result = tf.numpy_function(
            lambda *_: np.asarray(mark(), dtype.as_numpy_dtype),
            [_probe(values)] if values else [],
            dtype,
        )
    result.set_shape([])
    return result


def _probe(values: list[Any]) -> Any:
    return tf.reshape(values[-1], [-1])[:1]


def _after(mark: Any, tensors: list[Any]) -> list[Any]:
    """Return the same tensors, available once a mark is made."""
    with tf.control_dependencies([mark]):
        return [_with_values(tensor, tf.identity(_values(tensor))) for tensor in tensors]


def _times(gradient: Any, factor: Any) -> Any:
    values = _values(gradient)
    # A worker without samples runs a placeholder, whose gradient may be infinite or NaN.
    return _with_values(gradient, tf.math.multiply_no_nan(values, tf.cast(factor, values.dtype)))


def _values(tensor: Any) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def _with_values(tensor: Any, values: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    return values
