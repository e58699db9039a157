"""Runs that measure the noise of their gradient, and what one process finds on the same samples."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenstride
from evenstride.core.gradients.noise_scale import StepParts
from evenstride.errors import EvenstrideError
from evenstride.runtime.noise.noise_meter import NoiseMeter
from tests.multiproc.training import (
    FEATURES,
    Sentences,
    Short,
    net,
    padded,
    rows,
    token_loss,
    token_net,
    tokens_in,
    weights,
)

RATE, SCALE = 0.05, 1024.0

Ids = list[list[list[int]]]
"""Of each step, the samples of each micro-batch of a rank."""


@dataclass(frozen=True)
class Run:
    """What one run does; plain data, so that it can be sent to a rank.

    Args:
        policy: with fixed shares.
        every: steps from one measured step to the next; 0 for none.
        steps: fewest steps to train.
        heard: measured steps that the leader must have heard of before the end.
        micro: most samples per micro-batch.
        kind: ``rows``, ``tokens`` (weighed by a weight_fn), or ``tokens-argument`` (by `scale`).
        fits: samples that each rank has memory for; ``None`` for any number.
        view: whether DDP's gradients are views of its buckets.
        static_graph: whether it records the graph in its first step.
        branches: whether some batches do not reach all parameters.
        in_place: whether gradients are set to 0 rather than to nothing.
        scaler: whether a gradient scaler is used.
        kept: whether gradients are never set to 0.
        overflows: a step whose gradient is not finite.
        sync: the synchronisation mode.
        engine: ``ddp`` or ``own`` (a wrapper that averages in its own way).
        trace: file that the leader writes to.
    """

    policy: str = "static:8,16,40"
    every: int = 1
    steps: int = 4
    heard: int = 0
    micro: int | None = None
    kind: str = "rows"
    fits: int | None = None
    view: bool = False
    static_graph: bool = False
    branches: bool = False
    in_place: bool = False
    scaler: bool = False
    kept: bool = False
    overflows: int | None = None
    sync: str = "bsp"
    engine: str = "ddp"
    trace: str | None = None


class Branching(nn.Module):
    """A model that has a part which not every batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = net(), nn.Linear(FEATURES, 1).double()
        nn.init.constant_(self.extra.weight, 0.3)
        nn.init.constant_(self.extra.bias, -0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Run the body, and the other part where the first sample says so."""
        out: Tensor = self.body(x)
        return out + self.extra(x) if x[0, 0] > 0 else out


class Averaging(nn.Module):
    """A wrapper that averages gradients over all ranks, each as soon as it is there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Run the module."""
        out: Tensor = self.module(x)
        return out

    def no_sync(self) -> AbstractContextManager[None]:
        """Be known as an engine; nothing is ever held back here."""
        return nullcontext()

    @staticmethod
    def _average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def module_of(run: Run) -> nn.Module:
    """Return the model of a run, the same everywhere."""
    if run.kind != "rows":
        return token_net()
    return Branching() if run.branches else net()


def data_of(run: Run) -> Any:
    """Return its samples: some 19 steps of 64."""
    return rows(1216) if run.kind == "rows" else Sentences(1216)


def loss_of(model: nn.Module, batch: Any, run: Run) -> Tensor:
    """Return the mean loss over a batch."""
    if run.kind != "rows":
        return token_loss(model, batch[1])
    loss: Tensor = nn.functional.mse_loss(model(batch[1]), batch[2])
    return loss


def train(rank: int, run: Run) -> dict[str, Any]:
    """Train; return what this rank was given, found out and ended with.

    Keys: ids (see `Ids`), reported (parts of measured steps), weights, seen (squared norm of the
    gradients that the user's own hooks saw, per step), and hooks (how many of ours each step had).
    Noise and figures are the summary's, in words and in numbers.
    """
    del rank
    reported: list[StepParts] = []
    with pytest.MonkeyPatch.context() as patch:
        _overhear(patch, reported)
        stride = evenstride.Stride(
            64, policy=run.policy, noise_every=run.every, trace=run.trace, sync=run.sync
        )
        try:
            found = _train(stride, run)
        finally:
            stride.close()
    summary = stride.summary()  # of what the trace has, too
    return {
        **found,
        "reported": sorted(reported, key=lambda parts: parts.step),
        "noise": None if summary.noise is None else str(summary.noise),
        "figures": summary.to_dict()["noise"],
    }


def _overhear(patch: pytest.MonkeyPatch, reported: list[StepParts]) -> None:
    """Note what the leader gets, and what is left at the end."""
    take, close = NoiseMeter.take, NoiseMeter.close

    def overheard(meter: NoiseMeter) -> tuple[StepParts, ...]:
        taken = take(meter)
        reported.extend(taken)
        return taken

    def closed(meter: NoiseMeter) -> None:
        close(meter)
        overheard(meter)

    patch.setattr(NoiseMeter, "take", overheard)
    patch.setattr(NoiseMeter, "close", closed)


def _train(stride: evenstride.Stride, run: Run) -> dict[str, Any]:
    loader = _loader(stride, run)
    module = module_of(run)
    seen = _listen(module)
    model = stride.watch(_engine(module, run))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=run.scaler)
    ids: Ids = [[]]
    hooks: list[int] = []
    while not _done(stride, run, len(ids) - 1):
        for batch in loader:
            guard = nullcontext() if run.fits is None else stride.guard()
            with guard, stride.accumulate(model):
                loss = loss_of(model, batch, run)
                if run.overflows == len(ids) - 1:
                    loss = loss / torch.zeros(())
                hooks += [] if ids[-1] else [_ours(module)]
                weight = tokens_in(batch) if run.kind == "tokens-argument" else None
                scaler.scale(stride.scale(loss, weight)).backward()  # type: ignore[no-untyped-call]
            ids[-1] += [batch[0].tolist()] if stride.samples else []
            if not stride.synced:
                continue
            if run.overflows != len(ids) - 1:
                scaler.step(optimizer)
                scaler.update()
            if not run.kept:
                optimizer.zero_grad(set_to_none=not run.in_place)
            ids.append([])
            seen.append(0.0)
            if _done(stride, run, len(ids) - 1):
                break
    return {
        "ids": ids[:-1],
        "seen": seen[:-1],
        "hooks": hooks,
        "weights": weights(module),
    }


def _loader(stride: evenstride.Stride, run: Run) -> DataLoader[Any]:
    if run.kind == "rows":
        return stride.loader(data_of(run), max_micro_batch=run.micro)
    weight_fn = tokens_in if run.kind == "tokens" else None
    return stride.loader(
        data_of(run), max_micro_batch=run.micro, weight_fn=weight_fn, collate_fn=padded
    )


def _listen(module: nn.Module) -> list[float]:
    """Add hooks as a user might; return what they see, step by step."""
    seen = [0.0]

    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[-1] += float(parameter.grad.square().sum())

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    return seen


def _ours(module: nn.Module) -> int:
    """Return how many hooks exist in addition to those of `_listen`."""
    hooks = [p._post_accumulate_grad_hooks or {} for p in module.parameters()]
    return sum(len(some) - 1 for some in hooks)


def _engine(module: nn.Module, run: Run) -> nn.Module:
    if run.engine == "own":
        return Averaging(module)
    if run.fits is not None:
        module = Short(module, run.fits)
    return DistributedDataParallel(
        module,
        gradient_as_bucket_view=run.view,
        static_graph=run.static_graph,
        find_unused_parameters=run.branches,
    )


def _done(stride: evenstride.Stride, run: Run, trained: int) -> bool:
    """Return, alike on all ranks, whether this is the end."""
    if trained < run.steps or not run.heard:
        return trained >= run.steps
    noise = stride.summary().noise
    enough = noise is not None and noise.steps >= run.heard
    return stride.mean(float(enough), 1.0) > 0


@dataclass(frozen=True)
class Truth:
    """What one process finds for one step.

    Args:
        weights: of each rank's samples.
        squared: squared norm of each rank's own mean gradient.
        mean: squared norm of the gradient of all.
        losses: of each rank's samples, a mean.
    """

    weights: list[float]
    squared: list[float]
    mean: float
    losses: list[float]


def truths(run: Run, by_rank: list[Ids]) -> list[Truth]:
    """Return what one process finds, in plain PyTorch, training on the same samples."""
    module, data = module_of(run), data_of(run)
    found = []
    for step in range(len(by_rank[0])):
        gradients, heavy, losses = [], [], []
        for ids in by_rank:
            pieces = [_piece(module, data, samples, run) for samples in ids[step] if samples]
            weight = sum(weight for weight, _, _ in pieces)
            heavy.append(weight)
            gradients.append(sum((w / weight * g for w, g, _ in pieces), torch.zeros(())))
            losses.append(sum(w / weight * loss for w, _, loss in pieces))
        parts = zip(heavy, gradients, strict=True)
        mean = sum((w / sum(heavy) * g for w, g in parts), torch.zeros(()))
        squared = [float(gradient.square().sum()) for gradient in gradients]
        found.append(Truth(heavy, squared, float(mean.square().sum()), losses))
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(module.parameters())
            nn.utils.vector_to_parameters(flat - RATE * mean, module.parameters())
    return found


def _piece(
    module: nn.Module, data: Any, samples: list[int], run: Run
) -> tuple[float, Tensor, float]:
    """Return what a micro-batch weighs, its mean gradient, and its mean loss."""
    if run.kind != "rows":
        batch: Any = padded([data[index] for index in samples])
        weight = tokens_in(batch)
    else:
        batch, weight = data[samples], float(len(samples))
    for parameter in module.parameters():
        parameter.grad = None
    loss = loss_of(module, batch, run)
    loss.backward()  # type: ignore[no-untyped-call]
    flat = [
        (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in module.parameters()
    ]
    return weight, torch.cat(flat), loss.item()


def refused(rank: int, what: str) -> str:
    """Return the message for a request to measure that cannot be served."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    every = {"fsdp": 5, "others": 5 + rank}[what]
    strides: list[evenstride.Stride] = []
    try:
        strides.append(evenstride.Stride(64, noise_every=every))
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        strides[0].watch(model)
    except EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for stride in strides:
            stride.close()
    return ""
