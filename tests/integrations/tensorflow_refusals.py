"""What `TensorFlowStride` refuses, with the text that the user reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf

from evenstride.integrations.tensorflow import TensorFlowStride, connect
from tests.integrations.tensorflow_facts import BATCH
from tests.integrations.tensorflow_task import data, gradients_of, net, optimizer_of


def refusals(strategy: Any) -> dict[str, str]:
    """Return the text of each refusal."""
    found = {
        name: _text(partial(TensorFlowStride, BATCH, strategy=one))
        for name, one in _strategies().items()
    }
    of_torch: dict[str, dict[str, Any]] = {
        "a mode": {"sync": "asp"},
        "noise": {"noise_every": 3},
        "an engine": {"engine": "none"},
    }
    for name, options in of_torch.items():
        found[name] = _text(partial(TensorFlowStride, BATCH, **options))
    open_batch: Any = "auto"
    found["an open batch"] = _text(partial(TensorFlowStride, open_batch))
    found["a scope"] = _text(partial(_in_scope, strategy))
    with_strategy = TensorFlowStride(BATCH, strategy=strategy, policy="uniform")
    found |= _of_watch(with_strategy, strategy)
    with_strategy.close()
    found |= _of_loader(strategy) | _of_loop() | _of_config()
    return found


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _strategies() -> dict[str, Any]:
    # Those that need other machines have no parts here.
    bare = {
        name: getattr(tf.distribute, name).__new__(getattr(tf.distribute, name))
        for name in ("TPUStrategy", "ParameterServerStrategy")
    }
    return {
        "MirroredStrategy": tf.distribute.MirroredStrategy(["CPU:0"]),
        "CentralStorageStrategy": tf.distribute.experimental.CentralStorageStrategy(),
        **bare,
    }


def _in_scope(strategy: Any) -> None:
    with strategy.scope():
        TensorFlowStride(BATCH)


def _of_watch(stride: TensorFlowStride, strategy: Any) -> dict[str, str]:
    with strategy.scope():
        inside = net()
        norm = keras.layers.BatchNormalization(synchronized=True)
        normed = keras.Sequential([keras.Input((5,)), norm])
    other: Any = "median"
    return {
        "a model outside of the scope": _text(lambda: stride.watch(net())),
        "a model that is not built": _text(lambda: stride.watch(keras.Sequential())),
        "a synchronized batch norm": _text(lambda: stride.watch(normed)),
        "another optimizer": _text(lambda: stride.watch(inside, object())),
        "a reduction": _text(lambda: stride.watch(inside, reduction=other)),
        "a loop without the strategy": _text(lambda: stride.average([])),
    }


def _of_loader(strategy: Any) -> dict[str, str]:
    samples = tf.data.Dataset.from_tensor_slices(data())
    ids, x, _ = data()
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "a batched pipeline": (samples.batch(4).prefetch(1), {}),
        "a sharded pipeline": (samples.shard(2, 0), {}),
        "a shuffled pipeline": (samples.shuffle(10), {}),
        "a shuffled pipeline without a seed": (
            samples.shuffle(10, reshuffle_each_iteration=False),
            {},
        ),
        "a random mix": (tf.data.Dataset.sample_from_datasets([samples, samples]), {}),
        "an order by chance": (
            samples.map(lambda *one: one, num_parallel_calls=2, deterministic=False).prefetch(1),
            {},
        ),
        "a distributed data set": (strategy.experimental_distribute_dataset(samples.batch(4)), {}),
        "arrays that do not fit": ((ids, x[:5]), {}),
        "processes for a pipeline": (samples, {"num_workers": 1}),
        "micro-batches": (data(), {"max_micro_batch": 2}),
        "a collator of rows": (data(), {"collate_fn": list}),
    }
    found = {}
    for name, (given, options) in calls.items():
        stride = TensorFlowStride(BATCH)
        found[name] = _text(partial(stride.loader, given, **options))
        stride.close()
    return found


def _of_loop() -> dict[str, str]:
    stride = TensorFlowStride(BATCH, policy="uniform")
    loader = stride.loader(data())
    model, optimizer = net(), optimizer_of()
    stride.watch(model, optimizer)
    x, y = np.ones((4, 5)), np.ones((4, 1))
    model.compile(optimizer, "mse", run_eagerly=True)
    found = {
        "a step outside of the loop": _text(lambda: stride.average(gradients_of(model, x, y)[1])),
        "both ways to average": _both_ways(),
        "fit": _text(lambda: model.fit(x, y, verbose=0)),
        "a scaled loss": _text(lambda: stride.scale(1.0)),
        "two readings of a step": _text(lambda: list(loader)),
        # AutoGraph would wrap the error in one of its own, with the same text.
        "a batch fetched in a function": _text(
            tf.function(lambda: next(iter(loader)), autograph=False)
        ),
    }
    stride.close()
    return found


def _both_ways() -> str:
    """Step one optimizer that averages by itself, then average by hand for another one."""
    stride = TensorFlowStride(BATCH, policy="uniform")
    loader, model, optimizer = stride.loader(data()), net(), optimizer_of()
    stride.watch(model, optimizer)

    def train() -> None:
        for _, x, y in loader:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            stride.average(gradients)

    text = _text(train)
    stride.close()
    return text


def _of_config() -> dict[str, str]:
    cluster = {"worker": ["localhost:1", "localhost:2", "localhost:3"]}
    others = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    texts = {"a broken TF_CONFIG": '{"task": 0}', "a TF_CONFIG of others": others}
    found = {}
    for name, text in texts.items():
        # The same rank for all, so that they read the same text.
        with patch.dict(os.environ, {"TF_CONFIG": text, "RANK": "0"}):
            found[name] = _text(connect)
    return found
