"""Batch norm over the global batch: the statistics of one process, from unequal mini-batches.

Each rank sends (count, mean, sum of squared deviations) of its mini-batch, and every rank merges
the rows of all ranks.

This is an all-gather and not an all-reduce, because merging without cancellation needs the means of
both sides, which one sum over ranks cannot give. Every rank merges the same rows in the same order
by single operations. IEEE 754 rounds these alike on every processor, so running statistics stay
bitwise equal. The rows are float64, because float32 cannot count beyond 16,777,216 values, and the
latency of such a small message dominates its cost.

The result is exact for one forward and backward pass per rank and step. Micro-batches are
normalised one by one, as with gradient accumulation in one process. Every rank must run a layer
equally often, forward and backward. A forward pass inside a backward pass is regarded as activation
checkpointing: it computes the same, and does not change the running statistics.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits, tail_spans

logger = logging.getLogger("evenstride")


class Context(Protocol):
    """What a layer must know of its rank. Read in every forward pass."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share statistics; ``None`` with one process."""

    @property
    def counts(self) -> bool:
        """Whether this rank's samples count; a placeholder for a share of 0 does not."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a collective, also in the threads of the autograd engine."""


def merged(rows: Tensor) -> Tensor:
    """Return count, mean and squared deviations of a union from those of its parts.

    ``rows`` has shape ``(parts, 2 * channels + 1)``. Each row is a count (0 for an empty part), the
    means, and the sums of squared deviations from the means (both 0 if the count is 0). Equal input
    gives equal bits on every machine. Costs about ten small operations per doubling of the parts.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", COMPSTAT 1982, doi:10.1007/978-3-642-51461-6_3, in terms of means.
    """
    while len(rows) > 1:
        if len(rows) % 2:
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        rows = _merged_pairs(rows[0::2], rows[1::2])
    return rows[0]


def _merged_pairs(left: Tensor, right: Tensor) -> Tensor:
    n, mean, deviations = columns(left)
    m, other_mean, other_deviations = columns(right)
    count = n + m
    part = m / count.clamp(min=1.0)
    # Sums of squares would cancel if the mean is large.
    apart = other_mean - mean
    # No fused operations here: they round differently on different processors.
    union_mean = mean + apart * part
    union_deviations = deviations + other_deviations + apart * apart * (n * part)
    return torch.cat([count, union_mean, union_deviations], dim=1)


def columns(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of counts, means and squared deviations."""
    last_mean = rows.shape[-1] // 2 + 1
    return rows[..., :1], rows[..., 1:last_mean], rows[..., last_mean:]


def statistics_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def own_row(x: Tensor, counted: bool) -> Tensor:
    """Return count, means and squared deviations of this rank's values; zeros if none counts."""
    channels = x.size(1)
    row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if counted:
        # torch's kernel computes statistics in the dtype of the running statistics.
        unused = torch.zeros(2, channels, dtype=statistics_type(x), device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        count, means, deviations = columns(row)
        count.fill_(x.numel() // channels)
        means.copy_(mean)
        deviations.copy_(var).mul_(count)
    return row


class Moments(NamedTuple):
    """Statistics of the counted values of all ranks; equal on all ranks."""

    mean: Tensor  # shape (channels,), as var
    var: Tensor  # biased
    values: Tensor  # per channel; shape (1,), float64


class Normalise(torch.autograd.Function):
    """Normalise by given statistics; differentiate as if they were computed from all ranks' input.

    With ``z`` the normalised values and ``g`` the gradient of the output, the gradient of the input
    is ``(g - mean(g) - z * mean(g * z)) * weight / sqrt(var + eps)``, both means over the global
    batch. The gradients of weight and bias are sums over this rank alone; the engine adds those of
    the other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        union: Moments,
        eps: float,
        counted: bool,
        context: Context,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *union)
        ctx.eps, ctx.counted, ctx.context = eps, counted, context
        return _normalised(x, union, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        union = Moments(*saved)
        sums = torch.zeros(2, *union.mean.shape, dtype=torch.float64, device=x.device)
        if ctx.counted:  # not by a factor of 0: values that do not count may be infinite
            sums[1], sums[0] = _own_sums(g, x, union, ctx.eps)
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        for_x = None
        if of_x:
            total = sums.clone()
            # All ranks reach this line, counted or not, because the sum needs all of them.
            with ctx.context.waiting():
                dist.all_reduce(total, group=ctx.context.group)
            for_x = torch.zeros_like(x)
            if ctx.counted:
                for_x = _input_gradient(g, x, weight, union, total / union.values, ctx.eps)
        for_weight, for_bias = sums[1] if of_weight else None, sums[0] if of_bias else None
        return for_x, for_weight, for_bias, None, None, None, None


def _own_sums(g: Tensor, x: Tensor, union: Moments, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of ``g * z`` and of ``g`` over this rank, each of shape ``(channels,)``."""
    ones = torch.ones_like(union.mean)  # kernels may take the dtype of the sums from the weight
    wanted = [False, True, True]
    _, of_gz, of_g = torch.ops.aten.native_batch_norm_backward.default(
        g, x, ones, union.mean, union.var, None, None, False, eps, wanted
    )
    return of_gz, of_g


def _input_gradient(
    g: Tensor, x: Tensor, weight: Tensor | None, union: Moments, means: Tensor, eps: float
) -> Tensor:
    scale = torch.rsqrt(union.var + eps)
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    of_g, of_gz = (-means * scale).to(scale.dtype)
    # Normalising with other weights computes all terms without `g` in one pass over `x`.
    rest = _normalised(x.to(scale.dtype), union, of_gz, of_g, eps)
    by_channel = scale.view(-1, *(1 for _ in x.shape[2:]))
    return rest.addcmul_(g.to(scale.dtype), by_channel).to(x.dtype)


def _normalised(
    x: Tensor, union: Moments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale, shift = (None if p is None else p.to(union.mean.dtype) for p in (weight, bias))
    return F.batch_norm(x, union.mean, union.var, scale, shift, False, 0.0, eps)


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
    """Batch norm over the global batch, with each value counted once.

    In training it normalises by mean and biased variance over all counted values of a channel on
    all ranks. It tracks the mean and the unbiased variance, as `torch.nn.BatchNorm2d` does on the
    global batch. In evaluation it is `torch.nn.BatchNorm2d` without communication. Statistics of
    float16 and bfloat16 inputs are float32, for any dtype of the parameters. The state dict has
    the same keys as torch's. Input and output have shape ``(samples, channels, ...)``.

    A rank that does not count is normalised like the others, and all its gradients are exactly 0.
    Without a ``context``, also after unpickling, the layer acts as with one process. A deep copy
    keeps the context.

    Costs one all-gather of ``2 * channels + 1`` float64 per rank in the forward pass. If the input
    needs a gradient, it costs one all-reduce of ``2 * channels`` float64 in the backward pass.
    Under `torch.compile` the layer is a graph break. A forward pass waits for the accelerator only
    if this rank has fewer than 2 values per channel or ``momentum`` is ``None``.

    Ioffe and Szegedy, "Batch Normalization", ICML 2015, algorithm 1. The semantics are those of
    `torch.nn.SyncBatchNorm`, which takes no CPU tensors and counts every rank.
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
                f"batch norm got an input of shape {tuple(input.shape)}; it takes (samples, "
                f"{self.num_features}, ...); change the input, or num_features of the layer"
            )


def convert(module: nn.Module, context: Context) -> nn.Module:
    """Convert every batch norm in a module to the global batch, in place, and return the module.

    Each `torch.nn.BatchNorm1d`, ``2d``, ``3d`` and `torch.nn.SyncBatchNorm` changes its class and
    stays the same object. It keeps parameters, buffers, mode, hooks, ``qconfig`` and all references
    to it, also inside an engine. A layer that is converted already gets this context. Instance norm
    is not changed. If `check_convertible` raises, nothing is changed.
    """
    check_convertible(module)
    link = _Link(context)
    for layer in _layers(module):
        vars(layer).pop("process_group", None)  # of a SyncBatchNorm, and cannot be pickled
        layer.__class__ = UnionBatchNorm
        vars(layer)["_link"] = link
    return module


def check_convertible(module: nn.Module) -> None:
    """Raise `ConfigError` if a layer is lazy, parametrized, or has its own forward pass."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"sync_batch_norm() got a {type(module).__name__}; it takes a torch.nn.Module, before "
            "the module is wrapped"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            _check_convertible(name or "the module itself", layer)


def _layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the layers, each once, that take their statistics from one rank alone."""
    return [
        layer
        for layer in _layers(module)
        # A SyncBatchNorm uses all ranks, but counts placeholders as well.
        if not isinstance(layer, nn.SyncBatchNorm)
        and not (isinstance(layer, UnionBatchNorm) and layer._link.context is not None)
    ]


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(
            f"{name} is a {type(layer).__name__} with an unknown number of channels, and only an "
            "initialised batch norm can be converted; run one batch through the model first"
        )
    ours = _BatchNorm.forward, nn.SyncBatchNorm.forward, UnionBatchNorm.forward
    if is_parametrized(layer) or "forward" in vars(layer) or type(layer).forward not in ours:
        raise ConfigError(
            f"{name} is a {type(layer).__name__}, which does more than torch's batch norm and "
            "would lose that. Only BatchNorm1d, 2d, 3d and SyncBatchNorm can be converted; replace "
            "it by one of these, and put the additional work into a layer of its own"
        )


@functools.cache
def _uncompiled() -> Callable[[UnionBatchNorm, Tensor, Any], Tensor]:
    # Importing the compiler takes a second, so only runs that convert a layer pay for it.
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
        # Recomputed: autograd must save as many tensors as in the first pass.
        mean, var = mean.clone(), var.clone()
    return F.batch_norm(
        x, mean, var, layer.weight, layer.bias, from_batch, factor or 0.0, layer.eps
    )


def _forward_together(layer: UnionBatchNorm, x: Tensor, context: Context) -> Tensor:
    group = context.group
    if group is None or dist.get_world_size(group) == 1:
        return _forward_alone(layer, x)
    # A rank that does not count takes part nevertheless: an all-gather needs all ranks.
    counted = context.counts and x.numel() > 0
    own = own_row(x.detach(), counted)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with context.waiting():
        dist.all_gather(rows, own, group=group)
    count, mean, deviations = columns(merged(torch.stack(rows)))
    # A rank with 2 values need not wait for the accelerator to read the count. If the global batch
    # has fewer than 2, no rank has 2.
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
        f"batch norm cannot train on {values} value(s) per channel over all ranks: it needs at "
        "least 2 for a variance. Use a larger global batch, leave out a last batch that is too "
        "short (drop_last=True), or call eval() on the layer"
    )


def _next_factor(layer: UnionBatchNorm) -> float | None:
    """Count a batch and return its weight in the running statistics; ``None`` if it has none."""
    if not layer.training or not layer.track_running_stats or _recomputing():
        return None
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            return 1.0 / float(layer.num_batches_tracked)
    return layer.momentum or 0.0


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, and so was counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _track(running: Tensor | None, value: Tensor, factor: float) -> None:
    if running is not None:
        running.copy_(running.double() * (1.0 - factor) + value * factor)


class PlainNorms:
    """The layers with statistics of each rank's own batch: two warnings, and an error."""

    def __init__(self, world_size: int, fit: MicroBatchLimits) -> None:
        self._world_size, self._fit = world_size, fit
        self._layers: list[nn.Module] = []
        self._refusing: list[RemovableHandle] = []
        self._warned = self._looked_ahead = False

    def watch(self, model: nn.Module) -> None:
        if self._world_size > 1:
            self._layers += (layer for layer in batch_norms(model) if layer.training)

    @property
    def any(self) -> bool:
        """Whether such layers exist."""
        return bool(self._layers)

    def begin(self, draw: Draw) -> None:
        if not self._layers:
            return
        while self._refusing:
            self._refusing.pop().remove()
        if not self._looked_ahead:
            self._looked_ahead = True
            self._look_ahead(draw.window)
        if draw.samples <= 1:
            self._refusing += (p.register_forward_pre_hook(_refuse_one) for p in self._layers)
        if not self._warned and draw.share * self._world_size != draw.window:
            self._warned = True
            logger.warning(
                "the model has %d batch norm layer(s) with statistics of each rank's own batch. "
                "From step %d on these batches are unequal (%d of %d samples on this rank), so the "
                "ranks normalise differently, and rank 0's running statistics are kept. Use "
                "net = stride.sync_batch_norm(net) before wrapping it, group norm, or layer norm",
                len(self._layers),
                draw.step,
                draw.share,
                draw.window,
            )

    def _look_ahead(self, global_batch: int) -> None:
        """Warn if a rank may get one sample, of which most BatchNorm1d cannot take statistics."""
        spans, tail = self._fit.layout.spans, self._fit.layout.tail
        if not spans or not any(isinstance(layer, nn.BatchNorm1d) for layer in self._layers):
            return
        moving = any(fewest != most for fewest, most in spans)
        in_tail = [fewest for fewest, _ in tail_spans(spans, tail)] if tail else []
        if moving and tail >= 2 * len(spans):  # in proportion, up to rounding
            in_tail = [fewest * tail // global_batch for fewest, _ in spans]
        if min(in_tail, default=2) < 2:
            when = f"the last, short step of an epoch (of {tail} over all ranks)"
        elif moving and min(fewest for fewest, _ in spans) < 2:
            when = "a step"
        else:
            return
        # Only a warning: the loop may end earlier, and inputs may have values beyond the channels.
        certain = not moving or 0 < tail < 2 * len(spans)
        logger.warning(
            "some rank %s get one sample in %s. A BatchNorm1d cannot take statistics of one sample "
            "(unless the sample has several values per channel), so the run would end there. Give "
            "each rank at least two samples with Stride(min_share=2) and loader(drop_last=True), "
            "or take the statistics over all ranks with net = stride.sync_batch_norm(net) before "
            "wrapping it",
            "will" if certain else "may",
            when,
        )


def _refuse_one(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    values = inputs[0] if inputs else None
    if values is not None and layer.training and values.numel() == values.shape[1]:
        raise ConfigError(
            f"a {type(layer).__name__} got one value per channel, because this rank has a batch of "
            "one sample, and a single value has no variance. Give each rank at least two samples "
            "with Stride(min_share=2) (and drop_last=True for the last step), or take the "
            "statistics over all ranks with net = stride.sync_batch_norm(net) before wrapping it"
        )
