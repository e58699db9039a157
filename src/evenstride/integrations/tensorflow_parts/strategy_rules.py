"""What `TensorFlowStride` refuses, because its gradient could not be exact."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
import torch.distributed as dist

from evenstride.errors import ConfigError
from evenstride.runtime.environment import read_environment

_ONLY = (
    "use tf.distribute.MultiWorkerMirroredStrategy with one replica per process, or no strategy "
    "at all: start one process per device with torchrun"
)


def check_strategy(strategy: Any) -> None:
    """Raise `ConfigError` unless unequal batches are exact with a strategy, or without one."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if strategy is None:
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            raise ConfigError(
                f"TensorFlowStride() was called in the scope of a {_name(current)}, but without "
                "the strategy; pass it: TensorFlowStride(..., strategy=strategy)"
            )
        return
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ConfigError(f"strategy is a {_name(strategy)}, {_reason(strategy)}; {_ONLY}")
    replicas = strategy.num_replicas_in_sync
    if replicas > world_size:
        raise ConfigError(
            f"the strategy has {replicas} replicas for {world_size} process(es), and replicas of a "
            f"process get equal batches; {_ONLY}, with one GPU visible in each"
        )
    if replicas < world_size:
        raise ConfigError(
            f"the strategy has {replicas} replica(s), but there are {world_size} processes; call "
            "evenstride.integrations.tensorflow.connect() before "
            "tf.distribute.MultiWorkerMirroredStrategy()"
        )


def _name(strategy: Any) -> str:
    return type(strategy).__name__


def _reason(strategy: Any) -> str:
    name = _name(strategy)
    if "TPU" in name:
        return "whose program has fixed batch sizes"
    if "ParameterServer" in name:
        return "whose workers have no common step"
    if "Mirrored" in name or "CentralStorage" in name:
        return "whose replicas share a process and get equal batches"
    return "which was not tried"


def check_options(global_batch: Any, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for arguments of `Stride` that need gradients or optimizers of torch."""
    if not isinstance(global_batch, int):
        raise ConfigError(
            f"global_batch is {global_batch!r}: to choose it during the run, evenstride needs the "
            "gradient noise, which it measures with torch only; give a number of samples"
        )
    environment = read_environment(os.environ)
    sync = options.get("sync") or environment.sync or "bsp"
    if str(sync) != "bsp":
        raise ConfigError(
            f'sync="{sync}" needs a model of torch; leave it out, so that the workers sum their '
            "gradients in every step"
        )
    if options.get("noise_every") or (
        options.get("noise_every") is None and environment.noise_every
    ):
        raise ConfigError(
            "noise_every is set, but evenstride measures the gradient noise with torch only; leave "
            "noise_every and EVENSTRIDE_NOISE out"
        )
    for name in ("engine", "shard_group"):
        if name in options:
            raise ConfigError(f"{name}= is for models of torch; leave it out")


def check_model(model: Any, strategy: Any, reduction: Any) -> None:
    """Raise `ConfigError` unless a model can be trained exactly."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f'reduction is {reduction!r}; it must be "mean" for a loss that is a mean over the '
            'batch of this worker, or "sum" for one that adds up over the workers, such as a sum '
            "divided by the global batch"
        )
    if not model.variables:
        raise ConfigError(
            f"the {type(model).__name__} has no variables yet; build it first, with keras.Input or "
            "by calling it on a batch"
        )
    layers = model._flatten_layers() if isinstance(model, keras.Model) else ()
    if any(getattr(layer, "synchronized", False) for layer in layers):
        raise ConfigError(
            "a BatchNormalization layer has synchronized=True, which gives every worker's mean the "
            "same weight, whatever its batch; use synchronized=False, or a layer that does not mix "
            "samples, such as keras.layers.GroupNormalization"
        )
    if strategy is not None and not all(
        strategy.extended.variable_created_in_scope(getattr(variable, "value", variable))
        for variable in model.trainable_variables
    ):
        raise ConfigError(
            "the model was not made in the scope of the strategy, so each worker would have "
            "weights of its own; make it, and the optimizer, inside `with strategy.scope():`"
        )


def check_loader(options: Mapping[str, Any], *, piped: bool, rows: bool) -> None:
    """Raise `ConfigError` for options of `Stride.loader` that need torch.

    ``piped`` is whether the data is a `tf.data.Dataset`, ``rows`` whether it is arrays.
    """
    for name in ("max_micro_batch", "micro_batches"):
        if options.get(name) is not None and options.get("train", True):
            raise ConfigError(
                f"{name} splits a step into several batches, whose gradients TensorFlow would "
                "have to add up; leave it out. If a worker lacks memory, set "
                "TensorFlowStride(max_share=)"
            )
    if piped and options.get("num_workers"):
        raise ConfigError(
            "num_workers forks processes, in which TensorFlow cannot run a tf.data.Dataset; leave "
            "it out, and use map(..., num_parallel_calls=...) and prefetch()"
        )
    if rows and options.get("collate_fn") is not None:
        raise ConfigError(
            "collate_fn gets a list of samples, but the rows of arrays are taken as a batch; leave "
            "it out, and change the batch in the loop, or give a data set whose __getitem__ "
            "returns a sample"
        )
