"""Batch norm over the union batch: the statistics of one process, from unequal pieces.

Each rank sends (count, mean, sum of squared deviations) of its piece; every rank merges them all.

A gather, because merging without cancellation needs the means of both sides, which one sum over
ranks cannot give. Every rank merges the same rows in the same order by single operations, which
IEEE 754 rounds alike on every processor, so running statistics stay equal bit for bit. In float64,
because float32 cannot count beyond 16,777,216 values, and a message this small costs its latency.

Exact for one forward and backward pass per rank and step: micro-batches are normalised each on
their own, as with gradient accumulation in one process. Every rank must run a layer equally often,
forward and backward. A forward pass inside a backward pass is taken for activation checkpointing:
it computes the same, and leaves the running statistics alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from evenstride.errors import ConfigError
from evenstride.runtime.batch_norm.union_statistics import (
    Context,
    Moments,
    Normalise,
    columns,
    merged,
    own_row,
    statistics_type,
)


class _Link:
    """Holds a context, which cannot be copied or pickled: copies share it, pickles drop it."""

    __slots__ = ("context", "forward")

    def __init__(self, context: Context | None = None) -> None:
        self.context = context
        self.forward = None if context is None else _uncompiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


class UnionBatchNorm(_BatchNorm):
    """Batch norm whose batch is that of all ranks, each value counted once.

    In training it normalises by mean and biased variance over all counted values of a channel on
    all ranks, and tracks the mean and the unbiased variance, like `torch.nn.BatchNorm2d` on the
    union batch. In evaluation it is `torch.nn.BatchNorm2d` and talks to no one. Statistics of
    float16 and bfloat16 inputs are float32, whatever the parameters are. The state dict has the
    same keys as torch's.

    Input and output have shape ``(samples, channels, ...)`` with any number of further dimensions.
    A rank that does not count is normalised like the others, and all its gradients are exactly 0.

    Args:
        *args: what `torch.nn.BatchNorm2d` takes, as is ``**kwargs``.
        context: the rank's side of it; without one the layer acts as on one process, also after
            unpickling. A deep copy keeps the context.

    Raises:
        ConfigError: in the forward pass: the input has another number of channels, or all ranks
            together have fewer than 2 values per channel, which have no variance.
        RuntimeError: on differentiating a gradient again (two ranks or more).

    Cost:
        One gather of ``2 * channels + 1`` float64 per rank in the forward pass, and one sum of
        ``2 * channels`` in the backward pass if the input needs a gradient. Under `torch.compile`
        the layer is a graph break. A forward pass waits for the accelerator only if this rank has
        fewer than 2 values per channel or ``momentum`` is ``None``.

    Source:
        Ioffe and Szegedy, "Batch Normalization", ICML 2015, algorithm 1; the semantics are those
        of `torch.nn.SyncBatchNorm`, which takes no CPU tensors and has no rank that does not count.
    """

    _link = _Link()

    def __init__(self, *args: Any, context: Context | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._link = _Link(context)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Return the normalised input; same shape, type and memory format."""
        self._check_input_dim(input)
        link = self._link
        if link.forward is None or not self.training:
            return _forward_alone(self, input)
        return link.forward(self, input, link.context)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ConfigError(
                f"batch norm was given an input of shape {tuple(input.shape)}; it takes (samples, "
                f"{self.num_features}, ...); change the input, or num_features of the layer"
            )


def convert(module: nn.Module, context: Context) -> nn.Module:
    """Make every batch norm in a module one over the union batch, in place.

    Args:
        module: may be a batch norm itself, already converted (it then gets this context), or
            already inside an engine. Each `torch.nn.BatchNorm1d`, ``2d``, ``3d`` and
            `torch.nn.SyncBatchNorm` changes its class and stays the same object: parameters,
            buffers, mode, hooks, ``qconfig`` and whoever else refers to it are kept. The process
            group of a ``SyncBatchNorm`` gives way to that of the context. Instance norm stays.
        context: the rank's side of it.

    Returns:
        ``module``.

    Raises:
        ConfigError: a layer is lazy, parametrized, or has a forward pass of its own. Nothing was
            changed.
    """
    check_convertible(module)
    link = _Link(context)
    for layer in _layers(module):
        vars(layer).pop("process_group", None)  # of a SyncBatchNorm, and cannot be pickled
        layer.__class__ = UnionBatchNorm
        vars(layer)["_link"] = link
    return module


def check_convertible(module: nn.Module) -> None:
    """Raise unless `convert` can do its work.

    Raises:
        ConfigError: a layer is lazy, parametrized, or has a forward pass of its own.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"sync_batch_norm() got a {type(module).__name__}; it must be a torch.nn.Module, "
            "before it is wrapped"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            _check_convertible(name or "the module itself", layer)


def _layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the layers, each once, that take their statistics from one rank alone.

    Not `torch.nn.SyncBatchNorm` (it counts ghosts as well), nor a `UnionBatchNorm` with a context.
    """
    return [
        layer
        for layer in _layers(module)
        if not isinstance(layer, nn.SyncBatchNorm)
        and not (isinstance(layer, UnionBatchNorm) and layer._link.context is not None)
    ]


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(
            f"{name} is a {type(layer).__name__} whose number of channels is not known yet; only "
            "an initialised batch norm can be converted; run one batch through the model first"
        )
    ours = _BatchNorm.forward, nn.SyncBatchNorm.forward, UnionBatchNorm.forward
    if is_parametrized(layer) or "forward" in vars(layer) or type(layer).forward not in ours:
        raise ConfigError(
            f"{name} is a {type(layer).__name__}, which does more than torch's batch norm and "
            "would lose that; only BatchNorm1d, 2d, 3d and SyncBatchNorm can be converted; replace "
            "it by one of these, with what it does besides in a layer of its own"
        )


@functools.cache
def _uncompiled() -> Callable[[UnionBatchNorm, Tensor, Any], Tensor]:
    # Importing the compiler takes a second, so only those who convert a layer pay for it.
    forward: Any = torch.compiler.disable(_forward_together)  # type: ignore[no-untyped-call]
    return forward  # type: ignore[no-any-return]


def _forward_alone(layer: UnionBatchNorm, x: Tensor) -> Tensor:
    from_batch = layer.training or layer.running_mean is None
    values = x.numel() // layer.num_features
    if from_batch and values == 1:
        raise _no_variance(values)
    factor = _next_factor(layer)
    tracked = layer.track_running_stats or not layer.training
    mean, var = (layer.running_mean, layer.running_var) if tracked else (None, None)
    if layer.training and factor is None and mean is not None and var is not None:
        # Recomputed: autograd must save as many tensors as it did before.
        mean, var = mean.clone(), var.clone()
    return F.batch_norm(
        x, mean, var, layer.weight, layer.bias, from_batch, factor or 0.0, layer.eps
    )


def _forward_together(layer: UnionBatchNorm, x: Tensor, context: Context) -> Tensor:
    group = context.group
    if group is None or dist.get_world_size(group) == 1:
        return _forward_alone(layer, x)
    # A rank that does not count takes part nevertheless: a gather needs all ranks.
    counted = context.counts and x.numel() > 0
    own = own_row(x.detach(), counted)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with context.waiting():
        dist.all_gather(rows, own, group=group)
    count, mean, deviations = columns(merged(torch.stack(rows)))
    # Who has 2 values need not wait for the accelerator to see the count; and where the union has
    # fewer than 2, no rank has.
    if (x.numel() < 2 * x.size(1) or not counted) and count.item() < 2:
        raise _no_variance(int(count.item()))
    factor = _next_factor(layer)
    if factor is not None:
        _track(layer.running_mean, mean, factor)
        _track(layer.running_var, deviations / (count - 1), factor)
    dtype = statistics_type(x)
    union = Moments(mean.to(dtype), (deviations / count).to(dtype), count)
    y: Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, union, layer.eps, counted, context
    )
    return y


def _no_variance(values: int) -> ConfigError:
    return ConfigError(
        f"batch norm was asked to train on {values} value(s) per channel, over all ranks; it needs "
        "at least 2, or there is no variance; use a larger global batch, leave out a last batch "
        "that is too short (drop_last=True), or call eval() on the layer"
    )


def _next_factor(layer: UnionBatchNorm) -> float | None:
    """Count a batch and return its weight in the running statistics, ``None`` if it has none."""
    if not layer.training or not layer.track_running_stats or _recomputing():
        return None
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            return 1.0 / float(layer.num_batches_tracked)
    return layer.momentum or 0.0


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: then it has been counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _track(running: Tensor | None, value: Tensor, factor: float) -> None:
    if running is not None:
        running.copy_(running.double() * (1.0 - factor) + value * factor)
