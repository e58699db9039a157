"""Small models, data and training loops that ranks and the one-process reference share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES = 5


def rows(length: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return (id, features, target) rows, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(length, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(length), x.to(dtype), y.to(dtype))


def cost_of(index: int) -> float:
    """Return what a sample costs; a few cost much more than the others."""
    return 1.0 + 40.0 * (index % 7 == 0)


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small model, the same everywhere."""
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
    torch.set_rng_state(state)
    return model


def alone_on(length: int, steps: list[list[int]]) -> list[list[float]]:
    """Return the gradients of one process, in plain PyTorch, on the given samples of each step."""
    module, data, gradients = net(), rows(length), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for ids in steps:
        _, x, y = data[ids]
        F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
        gradients.append(flat(module))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


class Short(nn.Module):
    """A model that runs out of memory behind its first layer, and has a buffer.

    Args:
        module: layers in a row.
        fits: samples that it has memory for.
    """

    def __init__(self, module: nn.Module, fits: int) -> None:
        super().__init__()
        self.module, self.fits = module, fits
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        first, *rest = self.module.children()
        x = first(x)
        if len(x) > self.fits:
            raise torch.OutOfMemoryError
        for layer in rest:
            x = layer(x)
        return x


class Sentences(Dataset[tuple[int, Tensor]]):
    """Token sequences of different lengths."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        size = 1 + index % 6
        return index, torch.randint(1, 11, (size,), generator=generator)


def padded(samples: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return ids and tokens, padded with 0."""
    ids, tokens = zip(*samples, strict=True)
    return torch.tensor(ids), nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)


def tokens_in(batch: tuple[Tensor, Tensor]) -> float:
    """Return the number of tokens that are not padding."""
    return float((batch[1] != 0).sum())


def token_net() -> nn.Module:
    """Return a model that predicts each token from itself."""
    state = torch.get_rng_state()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()
    torch.set_rng_state(state)
    return model


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss over the tokens that are not padding."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)


class Augmented(Dataset[tuple[int, Tensor, Tensor]]):
    """Rows with noise from all three of the usual generators."""

    def __init__(self, length: int) -> None:
        self.rows = rows(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        _, x, y = self.rows[index]
        noise = torch.rand(FEATURES, dtype=torch.float64) + np.random.rand() + random.random()
        return index, x + 0.1 * noise, y


def flat(model: nn.Module) -> list[float]:
    """Return all gradients as one list of numbers."""
    grads = [p.grad for p in model.parameters()]
    return torch.cat([g.reshape(-1).double() for g in grads if g is not None]).tolist()


def weights(model: nn.Module) -> list[float]:
    """Return all parameters as one list of numbers."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def relative_error(actual: list[float], expected: list[float]) -> float:
    """Return ||actual - expected|| / ||expected||."""
    a, e = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((a - e).norm() / e.norm())


@dataclass(frozen=True)
class Loop:
    """What one training run does; plain data, so that it can be sent to a rank.

    Args:
        batch: global batch.
        length: samples.
        policy: how the shares are set.
        steps: steps to train.
        micro: most samples per micro-batch.
        kind: ``rows`` or ``tokens``, or ``tokens-argument`` (weight given to scale).
        clip: largest gradient norm.
        hook: a communication hook, by name.
        scaler: whether a gradient scaler is used.
        dtype: ``float64`` or ``float32``.
        poison: a rank whose every loss is infinite.
        fits: samples that each rank has memory for; more end its forward pass in the middle.
        late: whether they end it in the loss instead, when the forward pass is over.
        unused: whether DDP looks for parameters without a gradient.
        quanta: of each rank's shares.
        costs: whether samples are distributed by cost; ``function`` or ``array``.
        static_graph: whether DDP records the graph in its first step.
        broken: whether the weighting is broken on purpose.
    """

    batch: int
    length: int
    policy: str
    steps: int = 3
    micro: int | None = None
    pieces: int | None = None  # micro-batches of every step on every rank
    kind: str = "rows"
    clip: float | None = None
    hook: str | None = None
    scaler: bool = False
    dtype: str = "float64"
    poison: int | None = None
    fits: tuple[int, ...] | None = None
    late: bool = False
    unused: bool = False
    quanta: tuple[int, ...] | None = None
    costs: str | None = None
    static_graph: bool = False
    broken: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: Any = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
