"""What workers of TensorFlow train in tests, and what one process comes to without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.integrations.tensorflow_facts import BATCH, EPOCHS, SAMPLES
from tests.multiproc.training import rows
from tests.order import epoch_order

CLIP = 0.05
# Keras computes a loss in float32, whatever its arguments are.
LOSSES = {dtype: keras.losses.MeanSquaredError(dtype=dtype) for dtype in ("float32", "float64")}


def loss_fn(y: Any, out: Any) -> Any:
    return LOSSES[y.dtype.name](y, out)


def data(dtype: str = "float64") -> tuple[Any, Any, Any]:
    """Return the arrays of ids, features and targets."""
    ids, x, y = (tensor.numpy() for tensor in rows(SAMPLES).tensors)
    return ids, x.astype(dtype), y.astype(dtype)


def net(dtype: str = "float64") -> Any:
    """Return a small model with the same weights everywhere."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="float32" if dtype.startswith("mixed") else dtype),
            keras.layers.Dense(7, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )
    generator = np.random.default_rng(3)
    model.set_weights([generator.normal(size=one.shape) for one in model.get_weights()])
    return model


def optimizer_of() -> Any:
    """Return an optimizer with momentum, clipping and a schedule."""
    # Exact in float32, in which Keras computes a rate, with other roundings in a tf.function.
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    return keras.optimizers.SGD(rates, momentum=0.9, global_clipnorm=CLIP)


def gradients_of(model: Any, x: Any, y: Any, loss: Callable[[Any, Any], Any] = loss_fn) -> Any:
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    return value, tape.gradient(value, model.trainable_variables)


def flat(tensors: Any) -> list[float]:
    return [float(n) for one in tensors for n in np.asarray(one, np.float64).ravel()]


def weights(model: Any) -> list[float]:
    return flat(model.get_weights())


def orders() -> Iterator[Any]:
    """Yield the samples of each step, over all workers."""
    for epoch in range(EPOCHS):
        order = epoch_order(0, epoch, SAMPLES, shuffle=True)
        yield from (order[first : first + BATCH] for first in range(0, SAMPLES, BATCH))


def alone(dtype: str = "float64", optimizer: Any = None) -> dict[str, Any]:
    """Return gradients of each step, final weights and loss of one process on the same samples."""
    model, (_, x, y), found = net(dtype), data(dtype), []
    optimizer, loss = optimizer or optimizer_of(), 0.0
    for ids in orders():
        loss, gradients = gradients_of(model, tf.constant(x[ids]), tf.constant(y[ids]))
        found.append(flat(gradients))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"gradients": found, "weights": weights(model), "loss": float(loss)}
