"""The statistics and the arithmetic of batch norm over a union of unequal pieces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Context(Protocol):
    """What a layer must know of its rank. Read anew in every forward pass."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share statistics; ``None`` for one process."""

    @property
    def counts(self) -> bool:
        """Whether this rank's samples count; not those that stand in for a share of 0."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return what a collective is entered in, also in the threads of the autograd engine."""


def merged(rows: Tensor) -> Tensor:
    """Return count, mean and squared deviations of a union from those of its parts.

    Args:
        rows: shape ``(parts, 2 * channels + 1)``, each row a count (0 for nothing), the means and
            the sums of squared deviations from them (both 0 where the count is).

    Returns:
        One such row. Equal input gives equal bits on every machine.

    Cost:
        About ten small operations per doubling of the parts.

    Source:
        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances", COMPSTAT 1982, doi:10.1007/978-3-642-51461-6_3, in terms of means. Sums of
        squares would cancel where the mean is large.
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
    apart = other_mean - mean
    # No fused operations here: they round differently from processor to processor.
    union_mean = mean + apart * part
    union_deviations = deviations + other_deviations + apart * apart * (n * part)
    return torch.cat([count, union_mean, union_deviations], dim=1)


def columns(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of counts, means and squared deviations."""
    last_mean = rows.shape[-1] // 2 + 1
    return rows[..., :1], rows[..., 1:last_mean], rows[..., last_mean:]


def statistics_type(x: Tensor) -> torch.dtype:
    """Return the type in which to keep the statistics of an input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def own_row(x: Tensor, counted: bool) -> Tensor:
    """Return count, means and squared deviations of this rank's values; zeros if none counts."""
    channels = x.size(1)
    row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if counted:
        # torch's kernel keeps statistics in the type of the running ones it is given.
        unused = torch.zeros(2, channels, dtype=statistics_type(x), device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        count, means, deviations = columns(row)
        count.fill_(x.numel() // channels)
        means.copy_(mean)
        deviations.copy_(var).mul_(count)
    return row


class Moments(NamedTuple):
    """What is known of the counted values of all ranks; equal on all of them."""

    mean: Tensor  # shape (channels,), like the next
    var: Tensor  # biased
    values: Tensor  # per channel; shape (1,), float64


class Normalise(torch.autograd.Function):
    """Normalise by given statistics; differentiate as if they were computed from all ranks' input.

    With ``z`` the normalised values and ``g`` the gradient of the output, that of the input is
    ``(g - mean(g) - z * mean(g * z)) * weight / sqrt(var + eps)``, both means over the union.
    Those of weight and bias are sums over this rank alone; the engine adds the others'.
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
        if ctx.counted:  # not by multiplying with 0: what does not count may be infinite
            sums[1], sums[0] = _own_sums(g, x, union, ctx.eps)
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        for_x = None
        if of_x:
            total = sums.clone()
            # All ranks come here, counted or not: the sum needs all of them.
            with ctx.context.waiting():
                dist.all_reduce(total, group=ctx.context.group)
            for_x = torch.zeros_like(x)
            if ctx.counted:
                for_x = _input_gradient(g, x, weight, union, total / union.values, ctx.eps)
        for_weight, for_bias = sums[1] if of_weight else None, sums[0] if of_bias else None
        return for_x, for_weight, for_bias, None, None, None, None


def _own_sums(g: Tensor, x: Tensor, union: Moments, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of ``g * z`` and of ``g`` over this rank, each of shape ``(channels,)``."""
    ones = torch.ones_like(union.mean)  # kernels may take the type of the sums from the weight
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
    # Normalising with other weights computes all that does not depend on `g` in one pass over `x`.
    rest = _normalised(x.to(scale.dtype), union, of_gz, of_g, eps)
    by_channel = scale.view(-1, *(1 for _ in x.shape[2:]))
    return rest.addcmul_(g.to(scale.dtype), by_channel).to(x.dtype)


def _normalised(
    x: Tensor, union: Moments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale, shift = (None if p is None else p.to(union.mean.dtype) for p in (weight, bias))
    return F.batch_norm(x, union.mean, union.var, scale, shift, False, 0.0, eps)
