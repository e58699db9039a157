"""Whether weighted gradients are exact on this machine: a few steps against one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstride.lab.doctor.bench_ranks import BenchRank

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative error of the whole gradient that evenstride promises."""
_EXACT_STEPS, _FEATURES, _MICRO = 3, 8, 5


def exactness(place: BenchRank, new_stride: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return the largest relative error of any rank in each precision; collective.

    ``new_stride`` is `Stride`, which is examined.

    The reference is computed in float64 on the CPU, from the same weights and samples. The control
    is the error without `scale`, which should be large.
    """
    return {
        str(dtype).removeprefix("torch."): _judged(place, new_stride, dtype, limit)
        for dtype, limit in LIMITS.items()
    }


def wrong(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each precision whose error is above its limit."""
    return [
        f"the {name} gradient of unequal shares has a relative error of {one['error']:.1e}, "
        f"compared with one process on all samples; the limit is {one['limit']:.0e}"
        for name, one in figures.items()
        if not one["error"] <= one["limit"]
    ]


def _judged(
    place: BenchRank, new_stride: Callable[..., Any], dtype: torch.dtype, limit: float
) -> dict[str, Any]:
    with _full_precision():
        error = largest(place, _weighted_error(place, new_stride, dtype))
        control = largest(place, _unweighted_error(place, dtype))
    return {"error": error, "limit": limit, "control": control}


def largest(place: BenchRank, error: float) -> float:
    """Return the largest error of any rank; NaN counts as the largest."""
    errors = place.gathered(error)
    return next((one for one in errors if one != one), max(errors))


def _weighted_error(place: BenchRank, new_stride: Callable[..., Any], dtype: torch.dtype) -> float:
    """Train some steps with `Stride`; return the largest error of a gradient."""
    sizes = _sizes(place)
    policy = "static:" + ",".join(map(str, sizes))
    stride = new_stride(sum(sizes), policy=policy, process_group=place.group)
    try:
        rows, net = _rows(place, dtype), _exact_net(dtype)
        loader = stride.loader(rows, shuffle=False, max_micro_batch=_MICRO)
        model = stride.watch(place.averaged(net))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        errors: list[float] = []
        for x, y in loader:
            with stride.accumulate(model):
                stride.scale(F.mse_loss(model(x), y)).backward()
            if stride.synced:
                errors.append(_relative_error(net, rows, len(errors) * sum(sizes), sum(sizes)))
                optimizer.step()
                optimizer.zero_grad()
        return max(errors, key=lambda error: (error != error, error))
    finally:
        stride.close()


def _unweighted_error(place: BenchRank, dtype: torch.dtype) -> float:
    """Return the error of the first gradient without `scale`: the mean of the local means."""
    sizes = _sizes(place)
    rows, net = _rows(place, dtype), _exact_net(dtype)
    start = sum(sizes[: place.rank])
    x, y = rows[start : start + sizes[place.rank]]
    model = place.averaged(net)
    if place.group is not None:
        loss = F.mse_loss(model(x), y)
    else:  # one process: the mean over micro-batches of different sizes
        parts = [
            F.mse_loss(model(a), b) for a, b in zip(x.split(_MICRO), y.split(_MICRO), strict=True)
        ]
        loss = torch.stack(parts).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return _relative_error(net, rows, 0, sum(sizes))


def _relative_error(net: nn.Module, rows: TensorDataset, start: int, size: int) -> float:
    """Return the relative error of the gradient, compared with ``size`` rows from ``start`` on."""
    truth = copy.deepcopy(net).double().cpu()
    truth.zero_grad()
    x, y = (column.double().cpu() for column in rows[start : start + size])
    F.mse_loss(truth(x), y).backward()  # type: ignore[no-untyped-call]
    expected, actual = _flat(truth), _flat(net).double().cpu()
    return float((actual - expected).norm() / expected.norm())


def _flat(net: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in net.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def _sizes(place: BenchRank) -> list[int]:
    """Return the share of every rank: very unequal, and not multiples of the micro-batch."""
    return [3 + 6 * rank for rank in range(place.world_size)] if place.world_size > 1 else [7]


def _rows(place: BenchRank, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    length = _EXACT_STEPS * sum(_sizes(place))
    x = torch.randn(length, _FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(length, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(*(column.to(place.device, dtype) for column in (x, y)))


def _exact_net(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(_FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply float32 without TF32, which has 10 mantissa bits instead of 23."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
