"""A program that torchrun starts: loops of TensorFlow with unequal batches.

    torchrun --nproc-per-node 2 -m tests.integrations.tensorflow_local FOLDER whole
    torchrun --nproc-per-node 3 -m tests.integrations.tensorflow_local FOLDER rest

Each rank writes what it came to into the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
import torch.distributed as dist

from evenstride import Stream
from evenstride.integrations.tensorflow import TensorFlowStride, connect
from evenstride.integrations.tensorflow_parts.gradient_sum import GradientSum
from tests.integrations import tensorflow_refusals
from tests.integrations.tensorflow_facts import (
    BATCH,
    CUT_AFTER,
    EPOCHS,
    POLICY,
    SAMPLES,
    SHARES,
)
from tests.integrations.tensorflow_task import (
    alone,
    data,
    flat,
    gradients_of,
    loss_fn,
    net,
    optimizer_of,
    orders,
    weights,
)
from tests.multiproc.training import rows


def in_scope(strategy: Any) -> Any:
    return strategy.scope() if strategy else contextlib.nullcontext()


def kept_loop(
    strategy: Any, reduction: Literal["mean", "sum"] = "mean", saved: Path | None = None
) -> dict[str, Any]:
    """Train as a script does whose optimizer is watched; its clipping sees the global batch."""
    stride = TensorFlowStride(BATCH, strategy=strategy, policy=POLICY)
    loader = stride.loader(data())
    with in_scope(strategy):
        model, optimizer = net(), optimizer_of()
        seen = keras.metrics.MeanSquaredError(dtype="float64")
    stride.watch(model, optimizer, reduction=reduction)
    divided = tf.nn.compute_average_loss

    def summed(y: Any, out: Any) -> Any:
        return divided(tf.reduce_mean(tf.square(y - out), -1), global_batch_size=BATCH)

    def step(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(model, x, y, loss_fn if reduction == "mean" else summed)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(y, model(x))
        return loss

    traces: list[int] = []

    def traced(ids: Any, x: Any, y: Any) -> Any:
        traces.append(1)
        return strategy.run(step, args=(x, y)) if strategy else step(x, y)

    train_step = tf.function(traced, input_signature=loader.element_spec)
    trained = []
    for _ in range(EPOCHS):
        for ids, x, y in loader:
            train_step(ids, x, y)
            trained.append(ids.numpy().tolist())
            if saved and stride.step == CUT_AFTER:
                state = checkpoint_of(stride, model, optimizer)
                state.write(str(saved / f"state-{dist.get_rank()}"))
    came = {
        "trained": trained,
        "shares": stride.shares,
        "weights": weights(model),
        "metric": stride.result(seen),
        "length": len(loader),
        "traces": len(traces),
    }
    stride.close()
    return came


def checkpoint_of(stride: TensorFlowStride, model: Any, optimizer: Any) -> Any:
    return tf.train.Checkpoint(model=model, optimizer=optimizer, position=stride.position)


def by_hand(strategy: Any, dtype: str, *, graph: bool) -> dict[str, Any]:
    """Train with `average` before the optimizer; return the gradient of each step."""
    stride = TensorFlowStride(BATCH, strategy=strategy, policy=POLICY)
    loader = stride.loader(data(dtype) if graph else rows(SAMPLES))
    with in_scope(strategy):
        model, optimizer = net(dtype), optimizer_of()
    stride.watch(model, optimizer)

    def step(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(model, x, y)
        gradients = stride.average(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, gradients

    def train_step(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y)) if strategy else step(x, y)

    if graph:
        train_step = tf.function(train_step, reduce_retracing=True)
    found, loss, trained = [], 0.0, 0
    for _ in range(EPOCHS):
        for _, x, y in loader:
            loss, gradients = train_step(x, y)
            found.append(flat(gradients))
            trained = len(x)
    # With a strategy, Keras has divided the loss by the replicas.
    parts = 2 if strategy else 1
    loss = stride.mean(float(loss) * parts * trained, trained)
    came = {"gradients": found, "weights": weights(model), "loss": loss}
    stride.close()
    return came


def uneven(strategy: Any) -> list[float]:
    """Return the gradient of the first step if a script gives unequal batches to the strategy."""
    with strategy.scope():
        model, optimizer = net(), keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)
    before, (_, x, y), ids = model.get_weights(), data(), next(orders())
    ids = ids[: SHARES[0]] if dist.get_rank() == 0 else ids[SHARES[0] :]

    def step(x: Any, y: Any) -> None:
        _, gradients = gradients_of(model, x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train_step = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    train_step(tf.constant(x[ids]), tf.constant(y[ids]))
    return flat(old - new for old, new in zip(before, model.get_weights(), strict=True))


def streamed() -> dict[str, Any]:
    """Train the samples of a tf.data pipeline; return those of this worker, and the weights."""
    ids, x, y = data()
    pipeline = tf.data.Dataset.from_tensor_slices((ids, x, y)).map(lambda *one: one).prefetch(4)
    stride = TensorFlowStride(BATCH, policy=POLICY)
    loader = stride.loader(pipeline)
    model, optimizer = net(), optimizer_of()
    stride.watch(model, optimizer)
    trained = []
    for _ in range(EPOCHS):
        for some, x, y in loader:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            trained += some.numpy().tolist()
    shuffled = Stream(
        lambda epoch, skip: pipeline.shuffle(50, seed=epoch).skip(skip).as_numpy_iterator()
    )
    spec = [list(one.shape) for one in loader.element_spec]
    stride.close()
    other = TensorFlowStride(BATCH, policy=POLICY)
    batches = untrained(other, other.loader(shuffled))
    mixed = [number for some, _, _ in batches for number in some.numpy().tolist()]
    other.close()
    return {"trained": trained, "mixed": mixed, "spec": spec}


def untrained(stride: TensorFlowStride, loader: Any) -> Any:
    """Yield batches, and average nothing in each step."""
    for batch in loader:
        stride.average([])
        yield batch


def scaled_loss(strategy: Any) -> dict[str, Any]:
    """Train in mixed precision; in one step, the gradient of one worker overflows."""
    stride = TensorFlowStride(BATCH, strategy=strategy, policy=POLICY)
    loader = stride.loader(data("float32"))
    with in_scope(strategy):
        model, inner = net("mixed_float16"), keras.optimizers.SGD(0.05)
        scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    stride.watch(model, scaler)
    spoiled = tf.Variable(1.0)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            scaled = scaler.scale_loss(loss_fn(y, tf.cast(out, tf.float32))) * spoiled
        gradients = tape.gradient(scaled, model.trainable_variables)
        scaler.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def in_strategy(_: Any, x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y)) if strategy else step(x, y)

    train_step = tf.function(in_strategy, input_signature=loader.element_spec)
    before, iterations = weights(model), []
    for ids, x, y in loader:
        spoiled.assign(np.inf if stride.step == 1 and dist.get_rank() == 0 else 1.0)
        train_step(ids, x, y)
        iterations.append(int(inner.iterations.value.numpy()))
    came = {
        "iterations": iterations,
        "scale": float(scaler.dynamic_scale.value.numpy()),
        "moved": weights(model) != before,
        "weights": weights(model),
    }
    stride.close()
    return came


def sparse(strategy: Any) -> list[float]:
    """Return an embedding after one step, whose gradient is sparse and weighted by samples."""
    stride = TensorFlowStride(BATCH, strategy=strategy, policy=POLICY)
    with in_scope(strategy):
        model = keras.Sequential([keras.Input((), dtype="int64"), keras.layers.Embedding(44, 2)])
        model.set_weights([np.ones((44, 2), np.float32)])
        optimizer = keras.optimizers.SGD(1.0)
    stride.watch(model, optimizer, reduction="sum")

    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train_step = tf.function(lambda ids: strategy.run(step, args=(ids,)) if strategy else step(ids))
    for ids in stride.loader(data()[0]):
        train_step(ids)
        break
    stride.close()
    return weights(model)


class NoShare:
    """Marks of a worker without samples."""

    def ready(self, _: str) -> float:
        return 0.0

    def summed(self) -> None:
        pass


def placeholder() -> list[float]:
    """Return the gradient that a worker without samples adds if its own is not finite."""
    marks: Any = NoShare()
    given = [tf.constant([np.nan, np.inf, 1.0])]
    return flat(GradientSum(marks, None, 1).over_workers(given, "mean"))


def evaluated() -> dict[str, Any]:
    """Return the samples and the metric of an evaluation."""
    stride = TensorFlowStride(BATCH, policy=POLICY)
    metric, own = keras.metrics.MeanSquaredError(dtype="float64"), []
    ids, x, y = data()
    for inputs, labels in stride.loader(({"ids": ids, "x": x}, y), train=False):
        metric.update_state(labels, tf.zeros_like(labels))
        own += inputs["ids"].numpy().tolist()
    result, kept = stride.result(metric), float(metric.result())
    stride.close()
    return {"ids": own, "result": result, "kept": kept}


def repeated() -> list[int]:
    """Return the steps of two trainings, one after the other, with the same optimizer."""
    model, optimizer, steps = net(), optimizer_of(), []
    for _ in range(2):
        stride = TensorFlowStride(BATCH, policy=POLICY)
        loader = stride.loader(data())
        stride.watch(model, optimizer)
        for _, x, y in loader:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        steps.append(stride.step)
        stride.close()
    return steps


def whole(folder: Path) -> dict[str, Any]:
    """Do everything that two workers do."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return {
        "kept": kept_loop(None, saved=folder),
        "kept strategy": kept_loop(strategy),
        "sum strategy": kept_loop(strategy, "sum"),
        "by hand": by_hand(None, "float64", graph=True),
        "eager": by_hand(None, "float64", graph=False),
        "strategy": by_hand(strategy, "float64", graph=True),
        "eager strategy": by_hand(strategy, "float64", graph=False),
        "float32": by_hand(None, "float32", graph=True),
        "float32 strategy": by_hand(strategy, "float32", graph=True),
        "uneven": uneven(strategy),
        "streamed": streamed(),
        "scaled": scaled_loss(None),
        "scaled strategy": scaled_loss(strategy),
        "sparse": sparse(None),
        "sparse strategy": sparse(strategy),
        "placeholder": placeholder(),
        "evaluated": evaluated(),
        "repeated": repeated(),
        "refusals": tensorflow_refusals.refusals(strategy),
        "alone": alone(),
        "alone float32": alone("float32"),
        "alone sum": alone_with_sums(),
    }


def alone_with_sums() -> dict[str, Any]:
    """Return the weights of one process whose loss is a sum divided by the global batch."""
    model, (_, x, y), optimizer = net(), data(), optimizer_of()
    for ids in orders():
        _, gradients = gradients_of(
            model, x[ids], y[ids], lambda y, out: tf.reduce_sum(tf.square(y - out)) / BATCH
        )
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"weights": weights(model)}


def rest(folder: Path) -> dict[str, Any]:
    """Continue from the checkpoint of another number of workers."""
    stride = TensorFlowStride(BATCH, policy="static:2,3,5")
    loader = stride.loader(data())
    model, optimizer = net(), optimizer_of()
    stride.watch(model, optimizer)
    checkpoint_of(stride, model, optimizer).restore(str(folder / "state-0"))
    begun, trained = (stride.epoch, stride.step), []
    for _ in range(stride.epoch, EPOCHS):
        for ids, x, y in loader:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            trained.append(ids.numpy().tolist())
    came = {"begun": begun, "trained": trained, "weights": weights(model)}
    stride.close()
    return came


def main(folder: Path, what: Callable[[Path], dict[str, Any]]) -> None:
    with patch.dict(os.environ):
        connect()
        came = what(folder)
    file = folder / f"{what.__name__}-{dist.get_rank()}.json"
    file.write_text(json.dumps(came), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"whole": whole, "rest": rest}[sys.argv[2]])
