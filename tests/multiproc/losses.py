"""Losses that are no mean over samples: refused, warned about, or scaled by what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evenstride
from tests.multiproc.logs import logged
from tests.multiproc.refusals import raised
from tests.multiproc.training import flat
from tests.order import epoch_order

BATCH, LENGTH, CLASSES, IGNORED = 12, 28, 3, -100
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


def labelled(*, ignored: bool = False) -> TensorDataset:
    """Return (features, three classes) rows, the same everywhere; of some no class counts."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(LENGTH, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (LENGTH, 2), generator=generator)
    if ignored:
        y[::3, 1] = IGNORED
    return TensorDataset(x, y)


def classifier() -> nn.Module:
    """Return a model with two outputs of three classes, the same everywhere."""
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2 * CLASSES)).double()
    torch.set_rng_state(state)
    return model


def entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Return the cross-entropy over both outputs."""
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.flatten(), **options)


def counted(y: Tensor) -> float:
    """Return the targets that count."""
    return float((y != IGNORED).sum())


def weighed(y: Tensor) -> float:
    """Return the sum of the class weights of the targets."""
    return float(CLASS_WEIGHTS[y].sum())


class Batch:
    """What a loss is made of on one rank."""

    def __init__(self, stride: evenstride.Stride, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.stride, self.model, self.x, self.y = stride, model, x, y
        self.out: Tensor = model(x)

    def some(self) -> Tensor:
        """Return which elements of the output count: all but one."""
        counts = torch.ones(self.out.shape, dtype=torch.bool)
        counts[0, 0] = False
        return counts

    def penalty(self) -> Tensor:
        """Return a sum over parameters, some of as many rows as the batch may have samples."""
        total = torch.stack([p.square().sum() for p in self.model.parameters()])
        return F.mse_loss(total, torch.zeros_like(total), reduction="sum") + 0.1 * total.sum()


LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    # wrong
    "sum": lambda b: entropy(b.out, b.y, reduction="sum"),
    "sum of squares": lambda b: (b.out - 1).square().sum(),
    "sum and a penalty": lambda b: entropy(b.out, b.y, reduction="sum") + 0.1 * b.penalty(),
    "sum over a constant": lambda b: entropy(b.out, b.y, reduction="sum") / 1009,
    "sum over the global batch": lambda b: b.out.square().sum() / BATCH,
    "class weights": lambda b: entropy(b.out, b.y, weight=CLASS_WEIGHTS),
    "ignored targets": lambda b: entropy(b.out, b.y.clone().fill_diagonal_(IGNORED)),
    "a mean over some": lambda b: b.out[b.some()].mean(),
    "a mean as a sum": lambda b: entropy(b.out, b.y),
    # right
    "mean": lambda b: entropy(b.out, b.y),
    "mean and a penalty": lambda b: entropy(b.out, b.y) + b.penalty(),
    "sum over the samples": lambda b: 0.5 * entropy(b.out, b.y, reduction="sum") / len(b.x),
    "sum over the elements": lambda b: b.out.square().sum() / b.out.numel(),
    "smoothed labels": lambda b: entropy(b.out, b.y, label_smoothing=0.1),
    "rows, then a mean": lambda b: b.out.square().sum(1).mean(),
    "a mean of several": lambda b: torch.stack([entropy(b.out, b.y), b.out.square().mean()]).mean(),
    "a sum of means": lambda b: b.out.square().mean(0).sum(),
    "equal class weights": lambda b: entropy(b.out, b.y, weight=CLASS_WEIGHTS.new_full((3,), 2.0)),
    "checkpointed": lambda b: checkpoint(entropy, b.out, b.y, use_reentrant=False),
    "weighted by its weight": lambda b: entropy(b.out, b.y, weight=CLASS_WEIGHTS),
}
OPTIONS: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "a mean as a sum": lambda _: {"reduction": "sum"},
    "weighted by its weight": lambda b: {"weight": weighed(b.y)},
}


def first_step(
    _rank: int, name: str, policy: str, **watch: Any
) -> tuple[tuple[str, str], list[str]]:
    """Return what a rank hears of a loss in two steps, and what it is warned of."""
    stride = evenstride.Stride(global_batch=BATCH, policy=policy)
    loader, module = stride.loader(labelled(), drop_last=True), classifier()
    model = stride.watch(DistributedDataParallel(module), **watch)

    def train() -> None:
        for x, y in loader:
            batch = Batch(stride, model, x, y)
            options = OPTIONS[name](batch) if name in OPTIONS else {}
            stride.scale(LOSSES[name](batch), **options).backward()  # type: ignore[no-untyped-call]
            module.zero_grad()

    with logged() as log:
        answer = raised(train)
        stride.close()
    return answer, log


def unchecked(rank: int) -> tuple[tuple[str, str], list[str]]:
    """Return the same of a sum where the first loss is not looked at."""
    return first_step(rank, "sum", "uniform", check_loss=False)


def constant(_rank: int, by_batch: bool) -> list[str]:
    """Return what is warned where a sum is divided by the size of each batch, or of the first."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    loader, module = stride.loader(labelled()), classifier()  # the last batch is smaller
    model = stride.watch(DistributedDataParallel(module))
    with logged() as log:
        for x, y in loader:
            divisor = len(x) if by_batch else BATCH // dist.get_world_size()
            loss = entropy(model(x), y, reduction="sum") / divisor
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        stride.close()
    return log


DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "by ranks": lambda scaled: scaled / dist.get_world_size(),
    "by 3": lambda scaled: scaled / 3,
    "not": lambda scaled: scaled,
    "by a gradient scaler": lambda scaled: scaled * 65536.0,
}


def divided(_rank: int, name: str, micro: int | None) -> list[str]:
    """Return what is warned of a scaled loss that is divided once more."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    loader, module = stride.loader(labelled(), max_micro_batch=micro), classifier()
    model = stride.watch(DistributedDataParallel(module))
    with logged() as log:
        for x, y in loader:
            with stride.accumulate(model):
                DIVIDED[name](stride.scale(entropy(model(x), y))).backward()  # type: ignore[no-untyped-call]
        stride.close()
    return log


def two_losses(_rank: int) -> list[str]:
    """Return what is warned of two scaled losses that count half each."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    loader, module = stride.loader(labelled()), classifier()
    model = stride.watch(DistributedDataParallel(module))
    with logged() as log:
        for x, y in loader:
            out = model(x)
            one, other = stride.scale(entropy(out, y)), stride.scale(out.square().mean())
            (one / 2 + other / 2).backward()  # type: ignore[no-untyped-call]
        stride.close()
    return log


def _global(y: Tensor, count: Callable[[Tensor], float]) -> float:
    """Return the sum over all ranks of what counts in this step, as a framework works it out."""
    total = torch.tensor([count(y)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def summed(rank: int, kind: str, policy: str, micro: int | None) -> list[list[float]]:
    """Return the reduced gradients of an epoch with a loss that adds up over the ranks."""
    stride = evenstride.Stride(global_batch=BATCH, policy=policy)
    data, module = labelled(ignored=kind == "tokens"), classifier()
    loader = stride.loader(data, max_micro_batch=micro)
    model = stride.watch(DistributedDataParallel(module))
    gradients, total = [], 0.0
    fresh = True
    for x, y in loader:
        with stride.accumulate(model):
            if kind == "tokens" and fresh:
                total = _tokens_of_step(data, stride.step)
            loss = entropy(model(x), y, reduction="sum", ignore_index=IGNORED)
            scaled = stride.scale(loss / total if kind == "tokens" else loss, reduction="sum")
            scaled.backward()  # type: ignore[no-untyped-call]
        fresh = stride.synced
        if stride.synced:
            gradients.append(flat(module))
            module.zero_grad()
    stride.close()
    return gradients


def _tokens_of_step(data: TensorDataset, step: int) -> float:
    return counted(data[_steps()[step]][1])


def _steps() -> list[list[int]]:
    """Return the samples of each step of the first epoch."""
    order = epoch_order(0, 0, LENGTH, shuffle=True).tolist()
    return [order[start : start + BATCH] for start in range(0, LENGTH, BATCH)]


def weighted(_rank: int, kind: str, policy: str, micro: int | None) -> list[list[float]]:
    """Return the reduced gradients of an epoch with weights as the guide gives them."""
    stride = evenstride.Stride(global_batch=BATCH, policy=policy)
    data, module, count = labelled(ignored=kind == "ignored"), classifier(), COUNTS[kind]
    weight_fn = (lambda batch: count(batch[1])) if micro is not None else None
    loader = stride.loader(data, max_micro_batch=micro, weight_fn=weight_fn)
    model = stride.watch(DistributedDataParallel(module))
    gradients = []
    with logged() as log:
        for x, y in loader:
            with stride.accumulate(model):
                loss = entropy(model(x), y, **KINDS[kind])
                weight = count(y) if micro is None else None
                stride.scale(loss, weight=weight).backward()  # type: ignore[no-untyped-call]
            if stride.synced:
                gradients.append(flat(module))
                module.zero_grad()
        stride.close()
    assert not log, log
    return gradients


COUNTS: dict[str, Callable[[Tensor], float]] = {
    "class weights": weighed,
    "ignored": counted,
    "smoothed": lambda y: float(y.numel()),
    "class weights, smoothed": weighed,
}
KINDS: dict[str, dict[str, Any]] = {
    "class weights": {"weight": CLASS_WEIGHTS},
    "ignored": {"ignore_index": IGNORED},
    "smoothed": {"label_smoothing": 0.2},
    "class weights, smoothed": {"weight": CLASS_WEIGHTS, "label_smoothing": 0.2},
}


def alone(kind: str) -> list[list[float]]:
    """Return the gradients of one process on the union batches."""
    data, module, gradients = labelled(ignored=kind in ("tokens", "ignored")), classifier(), []
    for ids in _steps():
        x, y = data[ids]
        options = {"sum": {"reduction": "sum"}, "tokens": {}}.get(kind) or KINDS.get(kind, {})
        entropy(module(x), y, **options).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        module.zero_grad()
    return gradients


def refused(_rank: int, name: str) -> tuple[str, str]:
    """Return the message for an impossible explicit form."""
    stride = evenstride.Stride(global_batch=BATCH, policy="uniform")
    weight_fn = (lambda _: 1.0) if name == "a weight_fn" else None
    loader, module = stride.loader(labelled(), weight_fn=weight_fn), classifier()
    model = stride.watch(DistributedDataParallel(module))
    options: dict[str, Any] = {"reduction": "none" if name == "unknown" else "sum"}
    if name == "a weight":
        options["weight"] = 2.0

    def train() -> None:
        for x, y in loader:
            stride.scale(entropy(model(x), y, reduction="sum"), **options)

    answer = raised(train)
    stride.close()
    return answer
