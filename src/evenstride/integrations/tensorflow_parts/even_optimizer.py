"""Keras optimizers that apply the gradient of the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from evenstride.errors import ConfigError, UsageError

Average = Callable[[list[Any]], list[Any]]


def take_over(optimizer: Any, average: Average, applied: Callable[[], None]) -> None:
    """Let an optimizer call ``average`` with the gradients it gets, and ``applied`` at the end.

    The optimizer stays the same object, so that checkpoints and schedules keep it. Its class
    becomes a subclass of its class with the same name.

    Raises:
        ConfigError: It is no optimizer of Keras 3.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}, but "
            "watch() expects one of keras.optimizers, of Keras 3. To use another, train without a "
            "strategy, give watch() no optimizer, and call gradients = stride.average(gradients)"
        )

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _refuse_fit()
        result = super(even, self).apply(average(list(grads)), trainable_variables)
        applied()
        return result

    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
    if inner is not None:
        inner.__class__ = _subclass(_own_class(inner), _SUMMED)
    even = _subclass(_own_class(optimizer), {**_SUMMED, "apply": apply})
    optimizer.__class__ = even


def is_inner(optimizer: Any) -> bool:
    """Return whether an optimizer was taken over as the inner one of another."""
    return _is_ours(optimizer) and "apply" not in vars(type(optimizer))


def _own_class(optimizer: Any) -> type[Any]:
    """Return the class of an optimizer, which an earlier run may have taken over."""
    return type(optimizer).__mro__[1 if _is_ours(optimizer) else 0]


def _is_ours(optimizer: Any) -> bool:
    return _keep in vars(type(optimizer)).values()


def _keep(self: Any, grads_and_vars: Any) -> Any:
    # Keras sums over the replicas of a strategy after it clips, so each worker would clip by its
    # own batch. Here the gradients are summed already.
    del self
    return grads_and_vars


_SUMMED = {"_all_reduce_sum_gradients": _keep}


def _subclass(kind: type[Any], methods: dict[str, Any]) -> type[Any]:
    # Keras saves the name of an optimizer's class, and finds its own class by it.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **names})


def _refuse_fit() -> None:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "keras.src.backend.tensorflow.trainer":
            raise UsageError(
                "the optimizer was used by model.fit() or train_on_batch(), which batches the data "
                "itself and gives all workers' losses the same weight; write a loop: "
                "`for x, y in stride.loader(...):` with a GradientTape"
            )
        frame = frame.f_back
