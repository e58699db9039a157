"""The batch-norm runs: what each rank does, and what one process does with the union batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evenstride.errors import ConfigError
from evenstride.runtime.batch_norm.norm_layers import UnionBatchNorm, convert

CHANNELS = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (),
    "sequences": (5,),
    "images": (3, 2),
    "volumes": (2, 3, 2),
}
_MIXING: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Case:
    """What one run does; plain data, so that it can be sent to a rank.

    Args:
        shares: samples of each rank; 0 is a ghost, which runs one sample full of infinities.
        kind: shape of the samples, a key of `SHAPES`.
        norm: keyword arguments of every batch norm.
        engine: keyword arguments of `DistributedDataParallel`.
        dtype: of everything.
        checkpointed: ``reentrant`` or ``saved``, to recompute the middle layer.
        compiled: a backend of `torch.compile`.
        unused: whether the model has a layer that is not called.
        offset: added to the inputs of the first batch norm, in units of their spread.
        broken: whether the statistics are those of plain averaging over ranks.
    """

    shares: tuple[int, ...]
    kind: str = "rows"
    norm: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    checkpointed: str | None = None
    compiled: str | None = None
    unused: bool = False
    offset: float = 0.0
    broken: bool = False
    steps: int = 3

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: Any = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass
class Context:
    """One rank's side; counts how often it waited, and that no rank waits elsewhere."""

    group: dist.ProcessGroup | None
    counts: bool = True
    waits: int = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits += 1
        yield


class Net(nn.Module):
    """Three batch norms deep."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        dimensions = len(SHAPES[case.kind])
        # Without biases: their gradient is 0 but for rounding, and has no relative error.
        more = {"kernel_size": 3, "padding": 1} if dimensions else {}
        self.mixing = nn.ModuleList(
            _MIXING[dimensions](CHANNELS, CHANNELS, bias=False, **more) for _ in range(3)
        )
        self.norms = nn.ModuleList(_NORMS[dimensions](CHANNELS, **case.norm) for _ in range(3))
        if case.unused:
            self.unused = nn.Linear(2, 2)
        self.checkpointed, self.offset = case.checkpointed, case.offset

    def block(self, number: int, x: Tensor) -> Tensor:
        """Return one layer of three."""
        x = self.mixing[number](x) + (self.offset if number == 0 else 0.0)
        return torch.tanh(self.norms[number](x))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            if number == 1 and self.checkpointed:
                reentrant = self.checkpointed == "reentrant"
                x = checkpoint(self.block, number, x, use_reentrant=reentrant)
            else:
                x = self.block(number, x)
        return x


def net(case: Case) -> nn.Module:
    """Return the model, the same everywhere, with weights and biases that are not 1 and 0."""
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = Net(case)
    for parameter in model.norms.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    torch.set_rng_state(state)
    return model.to(case.torch_dtype)


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the union batch, unlike from sample to sample."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(case.shares), CHANNELS, *SHAPES[case.kind])
    x, t = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x += torch.arange(shape[0]).view(-1, *(1 for _ in shape[1:])) / 4  # pieces differ in mean
    return x.to(case.torch_dtype), t.to(case.torch_dtype)


def _piece(case: Case, rank: int, values: Tensor) -> Tensor:
    start = sum(case.shares[:rank])
    return values[start : start + case.shares[rank]].clone()


def _mean_loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean() + (y * t).mean()


def alone(case: Case) -> list[dict[str, list[float]]]:
    """Return what one process sees in each step, with torch's own batch norm."""
    model = net(replace(case, checkpointed=None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [_step(model, optimizer, *batch(case, step), _mean_loss) for step in range(case.steps)]


def train(rank: int, case: Case) -> list[dict[str, list[float]]]:
    """Return what a rank sees in each step; the gradient of its inputs as the union's."""
    with pytest.MonkeyPatch.context() as patch:
        if case.broken:
            patch.setattr("evenstride.runtime.batch_norm.norm_layers.merged", _mean_of_means)
        context = Context(dist.group.WORLD)
        model = convert(net(case), context)
        engine = DistributedDataParallel(model, **case.engine)
        if case.compiled:
            torch.compiler.reset()
            engine = torch.compile(engine, backend=case.compiled)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [
            _rank_step(rank, case, context, engine, optimizer, step) for step in range(case.steps)
        ]


def _rank_step(
    rank: int,
    case: Case,
    context: Context,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> dict[str, list[float]]:
    x, t = (_piece(case, rank, values) for values in batch(case, step))
    context.counts, weight = case.shares[rank] > 0, case.shares[rank] / sum(case.shares)
    if not context.counts:
        x = torch.full((1, *x.shape[1:]), torch.inf, dtype=x.dtype)
        t = torch.zeros_like(x)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        own = _mean_loss(y, t)
        return own * (len(case.shares) * weight) if weight else torch.nan_to_num(own) * 0.0

    handles = [
        p.register_hook(torch.nan_to_num)  # type: ignore[no-untyped-call]
        for p in model.parameters()
        if not weight
    ]
    seen = _step(model, optimizer, x, t, loss)
    for handle in handles:
        handle.remove()
    seen["inputs"] = [value / len(case.shares) for value in seen["inputs"]]
    return seen


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    t: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, list[float]]:
    x.requires_grad_()
    optimizer.zero_grad()
    y = model(x)
    loss(y, t).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = {name.rpartition("module.")[2]: _flat(value) for name, value in gradients.items()}
    optimizer.step()
    buffers = [b for norm in model.modules() for b in norm.buffers(recurse=False)]
    assert x.grad is not None
    return {
        **seen,
        "outputs": _flat(y),
        "inputs": _flat(x.grad),
        "buffers": [value for b in buffers for value in _flat(b)],
    }


def _flat(values: Tensor) -> list[float]:
    numbers: list[float] = values.detach().double().reshape(-1).tolist()
    return numbers


def _mean_of_means(rows: Tensor) -> Tensor:
    """Merge as if all parts were equally large, and their means alike."""
    mean = rows.mean(dim=0)
    mean[0] = rows[:, 0].sum()
    mean[1 + CHANNELS :] *= len(rows)
    return mean


def waits(rank: int, case: Case) -> tuple[int, int, int]:
    """Return how often one step waited, and one forward pass without gradient, and one in eval."""
    context = Context(dist.group.WORLD)
    model = convert(net(case), context)
    x = _piece(case, rank, batch(case, 0)[0]).requires_grad_()
    model(x).square().sum().backward()
    step, context.waits = context.waits, 0
    with torch.no_grad():
        model(x)
    forward, context.waits = context.waits, 0
    model.eval()
    for _ in range(rank):  # unequally often: no rank may wait
        model(x)
    return step, forward, context.waits


def refused(rank: int, case: Case) -> tuple[list[str], list[float]]:
    """Return the message for a batch that is too small, and the buffers afterwards."""
    layer = UnionBatchNorm(CHANNELS, context=Context(dist.group.WORLD, case.shares[rank] > 0))
    with pytest.raises(ConfigError) as error:
        layer(torch.randn(1, CHANNELS))
    return [str(error.value)], [v for b in layer.buffers() for v in _flat(b)]


def differentiated_twice(rank: int) -> str:
    """Return the message for the gradient of a gradient."""
    layer = UnionBatchNorm(CHANNELS, context=Context(dist.group.WORLD))
    x = torch.randn(3 + rank, CHANNELS, requires_grad=True)
    loss = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError) as error:
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]
    return str(error.value)


def half(rank: int, case: Case, automatic: bool) -> list[dict[str, list[float]]]:
    """Return a step of one layer on half-precision input: over the union, and in plain torch."""
    x, t = (values.to(torch.bfloat16) for values in batch(case, 0))
    context = Context(dist.group.WORLD)
    layers = nn.BatchNorm2d(CHANNELS), convert(nn.BatchNorm2d(CHANNELS), context)
    if not automatic:
        layers = layers[0].to(torch.bfloat16), layers[1].to(torch.bfloat16)
    pieces = (x, t), (_piece(case, rank, x), _piece(case, rank, t))
    answers = []
    for layer, (own, target) in zip(layers, pieces, strict=True):
        leaf = own.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=automatic):
            y = layer(leaf)
        assert y.dtype == torch.bfloat16
        (y.float() * target.float()).sum().backward()
        assert leaf.grad is not None
        buffers = [value for b in layer.buffers() for value in _flat(b)]
        answers.append({"outputs": _flat(y), "inputs": _flat(leaf.grad), "buffers": buffers})
    return answers


def copied(rank: int, case: Case) -> list[list[float]]:
    """Return the buffers of a layer and of its copy after the same step."""
    layer = convert(nn.BatchNorm1d(CHANNELS), Context(dist.group.WORLD))
    twin = copy.deepcopy(layer)
    x = _piece(case, rank, batch(case, 0)[0]).float()
    for one in (layer, twin):
        one(x)
    return [[v for b in one.buffers() for v in _flat(b)] for one in (layer, twin)]
