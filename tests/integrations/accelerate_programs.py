"""Scripts of Accelerate's users that ranks run, with `Accelerator` or `EvenAccelerator`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from evenstride.integrations.accelerate import EvenAccelerator
from tests.multiproc.training import (
    Sentences,
    flat,
    net,
    padded,
    relative_error,
    rows,
    token_loss,
    token_net,
    tokens_in,
    weights,
)
from tests.order import epoch_order

SAMPLES, BATCH, EPOCHS = 44, 5, 2
SPLIT = DataLoaderConfiguration(split_batches=True)
PROPORTIONS = {1: (1,), 2: (1, 3), 3: (1, 5, 2)}


@contextlib.contextmanager
def launched(rank: int, world_size: int) -> Iterator[pytest.MonkeyPatch]:
    """Look like a rank that a launcher has started."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,  # the process group is there already
            "OMP_NUM_THREADS": 1,
            "TORCHELASTIC_RUN_ID": "tests",
            "ACCELERATE_USE_FSDP": "false",
        }.items():
            patch.setenv(name, str(value))
        try:
            yield patch
        finally:
            forget()


def unequal(batch: int, proportions: tuple[int, ...] = ()) -> str:
    """Return a policy that splits a global batch unequally over all ranks."""
    parts = proportions or PROPORTIONS[dist.get_world_size()]
    shares = [batch * part // sum(parts) for part in parts]
    shares[-1] += batch - sum(shares)
    return "static:" + ",".join(map(str, shares))


def forget() -> None:
    """Reset the states that Accelerate shares between all accelerators of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Seen(Dataset[Any]):
    """A data set that notes which of its samples are loaded."""

    def __init__(self, data: Any) -> None:
        self.data, self.indices = data, list[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.indices.append(index)
        return self.data[index]


@dataclass
class Script:
    """A training script; only the class of its accelerator differs between two runs.

    Args:
        make: `Accelerator` or `EvenAccelerator`.
        steps: batches per update.
        options: of the accelerator.
        batch: samples of one process.
        by_hand: whether the loop accumulates by itself, as older scripts do.
        dtype: of weights and data.
    """

    make: Callable[..., Any] = EvenAccelerator
    steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH
    by_hand: bool = False
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.steps_in_one = 1 if self.by_hand else self.steps
        given: dict[str, Any] = {"gradient_accumulation_steps": self.steps_in_one}
        if self.make is EvenAccelerator:
            each = 1 if "dataloader_config" in self.options else dist.get_world_size()
            batch = self.options.get("global_batch", self.batch * self.steps_in_one * each)
            given["policy"] = unequal(batch)
        self.accelerator = accelerator = self.make(cpu=True, **given, **self.options)
        self.net, self.data = net(self.dtype), Seen(rows(SAMPLES, self.dtype))
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(self.data, batch_size=self.batch, shuffle=True)
        total = EPOCHS * -(-len(loader) // self.steps)
        scheduler = LambdaLR(optimizer, lambda step: max(0.1, 1 - step / total))
        prepared = accelerator.prepare(self.net, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.gradients: list[list[float]] = []
        self.rates: list[float] = []
        self.sizes: list[int] = []
        self.numbers: list[int] = []  # of the batches of each epoch
        self.logged: list[float] = []

    def train(self, epochs: range = range(EPOCHS), stop: int | None = None) -> None:
        """Train some epochs; stop after some updates."""
        for epoch in epochs:
            self.numbers.append(0)
            for number, batch in enumerate(self.active(epoch), 1):
                self.numbers[-1] = number
                self.on(batch, number)
                if len(self.gradients) == stop:
                    return

    def active(self, epoch: int) -> Any:
        """Return the loader for an epoch."""
        del epoch
        return self.loader

    def on(self, batch: Any, number: int) -> None:
        """Train on a batch."""
        accelerator, (_, x, y) = self.accelerator, batch
        self.sizes.append(len(x))
        if self.by_hand:
            accelerator.backward(F.mse_loss(self.model(x), y) / self.steps)
            if number % self.steps == 0 or number == len(self.loader):
                self.update()
            return
        with accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(x), y)
            # As many scripts do, in every batch.
            self.logged.append(accelerator.gather(loss.detach().repeat(self.batch)).mean().item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.update()

    def update(self) -> None:
        """Let optimizer and scheduler step, if the gradient is complete."""
        if self.accelerator.sync_gradients:
            self.gradients.append(flat(self.net))
        self.optimizer.step()
        self.scheduler.step()
        if self.accelerator.sync_gradients:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()

    def results(self) -> dict[str, Any]:
        """Return what came of the run, as plain data."""
        self.accelerator.free_memory()
        forget()
        return {
            "gradients": self.gradients,
            "rates": self.rates,
            "sizes": self.sizes,
            "numbers": self.numbers,
            "length": len(self.loader) if self.make is Accelerator else None,
            "logged": self.logged,
            "weights": weights(self.net),
            "loaded": self.data.indices,
        }


def ran(script: Script) -> dict[str, Any]:
    """Return what came of a whole run."""
    length = len(script.loader)
    script.train()
    return {**script.results(), "length": length}


def alone(
    batch: int,
    rates: list[float],
    *,
    by_hand: int = 1,
    dtype: torch.dtype = torch.float64,
    clip: bool = True,
) -> dict[str, Any]:
    """Return what plain PyTorch comes to in one process, on the global batches."""
    module, data, gradients = net(dtype), rows(SAMPLES, dtype), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        order = epoch_order(0, epoch, SAMPLES, shuffle=True)
        steps = -(-SAMPLES // batch)
        for step in range(steps):
            _, x, y = data[order[step * batch : (step + 1) * batch]]
            (F.mse_loss(module(x), y) / by_hand).backward()  # type: ignore[no-untyped-call]
            if (step + 1) % by_hand and step + 1 < steps:
                continue
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            gradients.append(flat(module))
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rates[len(gradients) - 1]
            optimizer.zero_grad()
    return {"gradients": gradients, "weights": weights(module)}


def training(rank: int) -> dict[str, Any]:
    """Train on two ranks in several ways."""
    with launched(rank, 2):
        found = {
            "plain": ran(Script(Accelerator)),
            "even": ran(Script()),
            "plain of 3": ran(Script(Accelerator, steps=3)),
            "even of 3": ran(Script(steps=3)),
            "of 7": ran(Script(steps=7, batch=1)),  # a rank has fewer samples than batches
            "by hand": ran(Script(steps=3, by_hand=True)),
            "split": ran(Script(options={"dataloader_config": SPLIT}, batch=10)),
            "float32": ran(Script(dtype=torch.float32)),
            "bf16": ran(Script(options={"mixed_precision": "bf16"}, dtype=torch.float32)),
        }
        for name, batch in (("even", 10), ("even of 3", 30), ("of 7", 14), ("split", 10)):
            found[name]["alone"] = alone(batch, found[name]["rates"])
        rates = found["by hand"]["rates"]
        found["by hand"]["alone"] = alone(10, rates, by_hand=3, clip=False)
        found["float32"]["alone"] = alone(10, found["float32"]["rates"], dtype=torch.float32)
        found["wrong"] = {"error": unweighted()}
        found["tokens"] = {"error": by_tokens()}
        found["norm"] = {"error": by_norm()}
        found["local"] = ran(Script(options={"sync": "local-sgd(every=2)"}))
        found["again"] = left_early()
    return found


def unweighted() -> float:
    """Return the error of a gradient that Accelerate alone averages over unequal batches."""
    script = Script()
    _, x, y = next(iter(script.loader))
    script.results()
    accelerator = Accelerator(cpu=True)
    module = net()
    model = accelerator.prepare(module)
    accelerator.backward(F.mse_loss(model(x), y))
    forget()
    return relative_error(flat(module), first_gradient(10))


def first_gradient(batch: int) -> list[float]:
    """Return one process's gradient of the first global batch."""
    module = net()
    _, x, y = rows(SAMPLES)[epoch_order(0, 0, SAMPLES, shuffle=True)[:batch]]
    F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
    return flat(module)


def by_tokens() -> float:
    """Return the error of a gradient whose loss is a mean over tokens, in two batches."""
    accelerator = EvenAccelerator(
        cpu=True, gradient_accumulation_steps=2, weight_fn=tokens_in, policy=unequal(16)
    )
    module = token_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(Sentences(24), batch_size=4, shuffle=True, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    for _, tokens in loader:
        with accelerator.accumulate(model):
            accelerator.backward(token_loss(model, tokens))
        if accelerator.sync_gradients:
            break
    found = flat(module)
    accelerator.free_memory()
    forget()
    module = token_net()
    data = Sentences(24)
    _, tokens = padded([data[int(i)] for i in epoch_order(0, 0, 24, shuffle=True)[:16]])
    token_loss(module, tokens).backward()  # type: ignore[no-untyped-call]
    return relative_error(found, flat(module))


def by_norm() -> float:
    """Return the error of a gradient through batch norm over all processes' samples."""
    made = EvenAccelerator(cpu=True, policy=unequal(10), sync_batch_norm=True)
    module = normed()
    loader = DataLoader(rows(SAMPLES), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = made.prepare(module, optimizer, loader)
    for _, x, y in loader:
        made.backward(F.mse_loss(model(x), y))
        break
    found = flat(module)
    made.free_memory()
    forget()
    module = normed()
    _, x, y = rows(SAMPLES)[epoch_order(0, 0, SAMPLES, shuffle=True)[:10]]
    F.mse_loss(module(x), y).backward()  # type: ignore[no-untyped-call]
    return relative_error(found, flat(module))


def normed() -> nn.Module:
    """Return a small model with batch norm, the same everywhere."""
    first, *rest = net().children()
    return nn.Sequential(first, nn.BatchNorm1d(7, dtype=torch.float64), *rest)


def left_early() -> dict[str, Any]:
    """Return which samples come if each pass is left after one batch, and the epochs."""
    script = Script()
    passes = []
    for _ in range(2):
        next(iter(script.loader))  # not trained
        for batch in script.loader:
            script.on(batch, 1)
            break
        passes.append((batch[0].tolist(), script.accelerator.stride.epoch))
    script.results()
    return {"passes": passes}
