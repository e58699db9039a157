"""TensorFlow 2 with Keras 3: a custom training loop. See docs/how-to/tensorflow.md.

Two loops are supported: one on `tf.distribute.MultiWorkerMirroredStrategy`, and one with a
`tf.GradientTape` alone. The strategy can carry unequal batches, because it *sums* gradients: a
weighted sum is exact for any split (measured with batches of 73 and 27: 3e-7 in float32 and 4e-16
in float64). To give every worker's mean the same weight is wrong: with 3 and 7 samples, by 0.48 of
the gradient's norm. So each worker's gradients are multiplied by its fraction of the global batch.
Then the collectives of the strategy sum them, or Gloo does without a strategy.

Traps of TensorFlow 2.21 and Keras 3.15 that this module avoids:

* A Keras optimizer sums over the workers *after* it has clipped, so each would clip by its own
  batch. Here it gets the sum, and does not sum again.
* The sum is a part of the compiled step, and takes as long as the slowest worker needs. So all
  workers seem equally slow from outside. Here, operations in the step mark when this worker's
  gradients are ready, and when their sum is.
* A `tf.function` is traced again for every new batch size; such a step is not measured.
  ``input_signature=loader.element_spec`` avoids it.
* ``OMP_NUM_THREADS``, which torchrun sets, does not limit TensorFlow's threads; `connect` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn

import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from evenstride.errors import ConfigError, UsageError
from evenstride.integrations.tensorflow_parts.even_optimizer import is_inner, take_over
from evenstride.integrations.tensorflow_parts.gradient_sum import GradientSum
from evenstride.integrations.tensorflow_parts.strategy_rules import (
    check_loader,
    check_model,
    check_options,
    check_strategy,
)
from evenstride.integrations.tensorflow_parts.tensor_batches import (
    ArrayRows,
    as_given,
    is_arrays,
    spec_of,
    stack,
    stream_of,
)
from evenstride.integrations.tensorflow_parts.worker_cluster import connect
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.loading.streams import Stream, window_kind
from evenstride.runtime.loss.outside_step import OutsideStep
from evenstride.runtime.run_start import refuse_everywhere
from evenstride.runtime.stride import Stride

__all__ = ["PositionState", "TensorFlowLoader", "TensorFlowStride", "connect"]

_TESTED = {"tensorflow": "2.21", "keras": "3.15"}


class TensorFlowStride(Stride):
    """A `Stride` for a training loop of TensorFlow; collective.

    Args:
        global_batch: Samples per step over all workers.
        strategy: The `tf.distribute.MultiWorkerMirroredStrategy` of the script, created after
            `connect`; ``None`` for a loop without a strategy, for which this calls `connect`.
        **options: Further arguments of `Stride`, such as ``policy``, ``trace`` or ``max_share``.

    Raises:
        ConfigError: The strategy or an option is not supported; or see `Stride`.

    Example::

        stride = TensorFlowStride(global_batch=512)
        loader = stride.loader((images, labels))
        optimizer = keras.optimizers.SGD(0.1)
        stride.watch(model, optimizer)

        @tf.function(input_signature=loader.element_spec)
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        for epoch in range(stride.epoch, epochs):
            for x, y in loader:
                train_step(x, y)
    """

    def __init__(
        self, global_batch: int, *, strategy: tf.distribute.Strategy | None = None, **options: Any
    ) -> None:
        connect()
        try:
            check_strategy(strategy)
            check_options(global_batch, options)
        except ConfigError as error:
            refuse_everywhere(error, options.get("process_group"))
        super().__init__(global_batch, engine="none", **options)
        self._strategy = strategy
        self._binding = binding = RunBinding(self)
        self._marks = OutsideStep(self)
        self._group = binding.own_group()
        if strategy is None:
            self._sum = GradientSum(self._marks, self._group, replicas=1)
        else:
            self._sum = GradientSum(self._marks, None, binding.world_size)
        self._reduction = "mean"
        self._by_hand = False  # whether the script calls `average` itself
        self._by_optimizer = False  # whether a watched optimizer has averaged
        self.position = PositionState(self)
        """The position in the data, to be saved by `tf.train.Checkpoint`."""
        if binding.rank == 0:
            for package, release in _TESTED.items():
                warn_if_untested(_installed(package), release, release)

    def loader(self, dataset: Any, **options: Any) -> TensorFlowLoader:  # type: ignore[override]
        """Return the loader of this worker's batches, as tensors of TensorFlow; collective.

        Args:
            dataset: Arrays with one row per sample, in a tuple or dictionary, nested or not
                (``(images, labels)``); or a `tf.data.Dataset` of samples, which is read as a
                stream: every worker reads all of it, and keeps its own samples. Or what
                `Stride.loader` takes, with samples of arrays or numbers.
            **options: Further arguments of `Stride.loader`. ``train=False`` is for evaluation.

        Raises:
            ConfigError: The `tf.data.Dataset` is batched, sharded or in a random order; or an
                option is not supported; or see `Stride.loader`.
        """
        piped = isinstance(dataset, tf.data.Dataset | tf.distribute.DistributedDataset)
        rows = is_arrays(dataset)
        try:
            check_loader(options, piped=piped, rows=rows)
            if piped:
                dataset = stream_of(dataset)
            elif rows:
                dataset = ArrayRows(dataset)
                options = {**options, "collate_fn": as_given, "seeded": False}
        except ConfigError as error:
            refuse_everywhere(error, None)
        if not rows and window_kind(dataset) != "function":
            options = {"collate_fn": stack, **options}
        return TensorFlowLoader(super().loader(dataset, **options), self._marks, dataset, options)

    def watch(  # type: ignore[override]
        self, model: Any, *optimizers: Any, reduction: Literal["mean", "sum"] = "mean"
    ) -> Any:
        """Let optimizers apply the gradient of the global batch, and return the model; collective.

        The optimizers then weight, sum and apply what ``apply_gradients`` gets. Clipping, loss
        scaling and accumulation of the optimizer come after the sum, so they see the global batch.
        Without a strategy, all workers get the variables of worker 0.

        Args:
            model: A Keras model or `tf.Module` that is built.
            *optimizers: Optimizers of Keras, outermost first if they are nested. Give none if the
                script calls `average` itself.
            reduction: ``mean`` if the loss is a mean over this worker's batch, as Keras losses
                are. With a strategy, it must be divided by the number of replicas, which Keras
                losses do by themselves. ``sum`` if it adds up over the workers, as with
                ``tf.nn.compute_average_loss(..., global_batch_size=)``.

        Raises:
            ConfigError: The model is not built, was made outside of the strategy's scope, or has a
                synchronized batch norm; an optimizer is not of Keras 3; or the workers disagree.
        """

        def show() -> Plain:
            check_model(model, self._strategy, reduction)
            for optimizer in optimizers:
                if not is_inner(optimizer):
                    take_over(optimizer, self._averaged, self._sum.applied)
            shapes = [list(variable.shape) for variable in model.variables]
            return {"variables": shapes, "reduction": reduction, "optimizers": len(optimizers)}

        self._binding.agree("watch()", show, _judge)
        self._reduction = reduction
        if self._group is not None and self._strategy is None:
            with self._binding.waiting():
                for variable in model.variables:
                    self._copy_from_first(variable)
        return model

    def average(self, gradients: Any) -> list[Any]:
        """Return the gradients of the global batch, for scripts that use them before an optimizer.

        Call it once per step on every worker, in the `tf.function` or outside, and in the
        replica's function with a strategy. All optimizers given to `watch` then apply what they
        get, so call it for the gradients of each.

        Args:
            gradients: Of this worker's loss, as ``tape.gradient`` returns them: tensors, sparse
                gradients (`tf.IndexedSlices`) or ``None``, in the same order on every worker.

        Raises:
            UsageError: Called outside the training loop, not in the strategy that was given, or
                after an optimizer given to `watch` has averaged by itself.
        """
        if self._by_optimizer:  # which would apply this worker's own gradients from now on
            raise UsageError(
                "average() was called, but an optimizer given to watch() has averaged gradients "
                "before; with several optimizers, call stride.average() for the gradients of each "
                "before it gets them, or for none"
            )
        self._by_hand = True
        self._check_context()
        total = self._sum.over_workers(list(gradients), self._reduction)
        self._sum.applied()
        return total

    def result(self, metric: Any) -> float:
        """Return the result of a metric of Keras over the samples of all workers; collective.

        The metric must add up over samples, as `keras.metrics.Mean` and accuracies do. Its own
        state does not change. The result of a metric made in the scope of a strategy covers all
        workers already.
        """
        if self._group is None or self._of_strategy(metric):
            return float(metric.result())
        own = [variable.numpy() for variable in metric.variables]
        with self._binding.waiting():
            for variable, value in zip(metric.variables, own, strict=True):
                whole = torch.from_numpy(np.array(value))
                dist.all_reduce(whole, group=self._group)
                variable.assign(whole.numpy())
        result = float(metric.result())
        for variable, value in zip(metric.variables, own, strict=True):
            variable.assign(value)
        return result

    def scale(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: the gradients are weighted, not the loss."""
        _refuse("scale", "leave it out: the optimizers given to watch() weight the gradients")

    def accumulate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: each share is one batch."""
        _refuse("accumulate", "leave it out: each share is one batch")

    def guard(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: TensorFlow cannot repeat a step that did not fit into memory."""
        _refuse("guard", "set max_share on a worker that lacks memory")

    def sync_batch_norm(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `UsageError`: batch norm of Keras is not merged."""
        _refuse("sync_batch_norm", "use a layer that does not mix samples: GroupNormalization")

    @property
    def chief(self) -> bool:
        """Whether this is worker 0, which prints and saves."""
        return self._binding.rank == 0

    def _of_strategy(self, metric: Any) -> bool:
        return self._strategy is not None and all(
            self._strategy.extended.variable_created_in_scope(variable.value)
            for variable in metric.variables
        )

    def _averaged(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients of the global batch; of an optimizer."""
        if self._by_hand:
            return gradients
        self._by_optimizer = True
        self._check_context()
        return self._sum.over_workers(gradients, self._reduction)

    def _check_context(self) -> None:
        context = tf.distribute.get_replica_context()
        current = None if context is None else context.strategy
        wanted = self._strategy or tf.distribute.get_strategy()
        if current is not wanted or (self._strategy is None and tf.distribute.has_strategy()):
            given = "no strategy" if self._strategy is None else type(self._strategy).__name__
            raise UsageError(
                f"the gradients are not averaged in the strategy of TensorFlowStride ({given}); "
                "pass the script's as strategy=, and run the step in strategy.run(step, args=...)"
            )

    def _copy_from_first(self, variable: Any) -> None:
        value = np.array(variable.numpy())
        if value.dtype.kind == "V":  # of a type that numpy lacks, such as bfloat16
            value = value.astype(np.float32)
        if value.dtype.kind in "fi":  # no states of random generators, which are unsigned
            whole = torch.from_numpy(value)
            dist.broadcast(whole, group=self._group, group_src=0)
            variable.assign(whole.numpy())


class TensorFlowLoader:
    """The batches of a worker as tensors of TensorFlow; `TensorFlowStride.loader` returns it.

    ``len(loader)`` is the number of steps of an epoch, equal on every worker.
    """

    def __init__(
        self, loader: Any, marks: OutsideStep, source: Any, options: dict[str, Any]
    ) -> None:
        self._loader, self._marks, self._source = loader, marks, source
        self._train = options.get("train", True)
        self._collate = options.get("collate_fn", as_given)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if tf.inside_function():
                raise UsageError(
                    "a batch was fetched in a tf.function, which would use it in every step, as "
                    "Python code runs there only while it is traced; fetch outside, and pass the "
                    "batch: `for batch in loader: train_step(batch)`"
                )
            yield tf.nest.map_structure(tf.convert_to_tensor, batch)
            if self._train and not self._marks.committed:
                raise UsageError(
                    "the next batch was fetched, but the gradients of this one were not averaged, "
                    "and the other workers would wait for them; in every step, call "
                    "optimizer.apply_gradients() of an optimizer given to watch(), or "
                    "stride.average()"
                )

    @property
    def element_spec(self) -> Any:
        """The specs of a batch with an open batch dimension, for ``tf.function``.

        ``input_signature=`` takes it as it is if a batch is a tuple; else put it into a list.
        """
        source = self._source
        if isinstance(source, Stream):
            sample = next(iter(source.read(0, 0)))
            sample = sample if source.transform is None else source.transform(sample)
        elif hasattr(source, "__getitem__"):
            sample = source[0]
        else:
            raise ConfigError(
                f"a {type(source).__name__} has no first sample, so the specs of its batches are "
                "not known; write them: input_signature=[tf.TensorSpec([None, ...], ...)]"
            )
        rows = isinstance(source, ArrayRows)
        return spec_of(stack([sample]) if rows else self._collate([sample]))


class PositionState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The position in the data, as a part of a `tf.train.Checkpoint`.

    ``tf.train.Checkpoint(model=model, optimizer=optimizer, position=stride.position)`` saves it,
    and `restore` goes to it, also within an epoch and with another number of workers.
    """

    def __init__(self, stride: Stride) -> None:
        super().__init__()
        self._stride = stride

    def serialize(self) -> str:
        """Return the position as text; raise `StepInFlight` within a step."""
        return json.dumps(self._stride.state_dict())

    def deserialize(self, string_value: Any) -> None:
        """Go to a saved position."""
        self._stride.load_state_dict(json.loads(string_value))


def _judge(shown: list[Plain]) -> Plain:
    for rank, one in enumerate(shown):
        different = [name for name, value in one.items() if value != shown[0][name]]
        if different:
            raise ConfigError(
                f"watch() got different {different[0]} on the workers: {one[different[0]]} on "
                f"worker {rank}, and {shown[0][different[0]]} on worker 0; run the same script on "
                "every worker"
            )
    return {}


def _refuse(name: str, instead: str) -> NoReturn:
    raise UsageError(f"{name}() is for models of torch; {instead}")


def _installed(package: str) -> str:
    """Return the name under which a package is installed: TensorFlow has several."""
    for name in (package, f"{package}-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return package
