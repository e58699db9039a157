"""Scripts of Accelerate's users that ranks run, with `Accelerator` or `EvenAccelerator`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from evenstride.errors import EvenstrideError
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

    def told(self) -> dict[str, Any]:
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
    return {**script.told(), "length": length}


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
        told = {
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
            told[name]["alone"] = alone(batch, told[name]["rates"])
        rates = told["by hand"]["rates"]
        told["by hand"]["alone"] = alone(10, rates, by_hand=3, clip=False)
        told["float32"]["alone"] = alone(10, told["float32"]["rates"], dtype=torch.float32)
        told["wrong"] = {"error": unweighted()}
        told["tokens"] = {"error": by_tokens()}
        told["norm"] = {"error": by_norm()}
        told["local"] = ran(Script(options={"sync": "local-sgd(every=2)"}))
        told["again"] = left_early()
    return told


def unweighted() -> float:
    """Return the error of a gradient that Accelerate alone averages over unequal batches."""
    script = Script()
    _, x, y = next(iter(script.loader))
    script.told()
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
        next(iter(script.loader))  # looked at, not trained
        for batch in script.loader:
            script.on(batch, 1)
            break
        passes.append((batch[0].tolist(), script.accelerator.stride.epoch))
    script.told()
    return {"passes": passes}


class Resuming(Script):
    """Saves a state in the midst of an epoch, or resumes as Accelerate's examples do."""

    def resume(self, folder: Path, updates: int) -> None:
        """Load a state and train to the end."""
        self.accelerator.load_state(str(folder))
        batches = updates * self.steps
        self.start, self.rest = divmod(batches, len(self.loader))
        self.train(range(self.start, EPOCHS))

    def active(self, epoch: int) -> Any:
        """Return the loader, from which a resumed epoch's first batches are skipped."""
        if epoch == getattr(self, "start", None):
            return self.accelerator.skip_first_batches(self.loader, self.rest)
        return self.loader


CUT = {1: 1, 3: 4}  # updates before the state is saved that so many processes load
WHOLE = 20  # samples of an update


def cut_and_whole(rank: int, folder: str) -> dict[str, Any]:
    """Train on two ranks and save after some updates; also train to the end at once."""
    told: dict[str, Any] = {}
    with launched(rank, 2):
        for updates in CUT.values():
            script = Resuming(steps=2)
            script.train(stop=updates)
            script.accelerator.save_state(str(Path(folder, f"after {updates}")))
            told[str(updates)] = script.told()
        told["whole"] = ran(Resuming(steps=2))
        told["mid-update"] = in_flight()
    return told


def resumed(rank: int, folder: str, updates: int, world_size: int) -> dict[str, Any]:
    """Resume with another number of processes, and without the number that it needs."""
    with launched(rank, world_size):
        script = Resuming(steps=2, options={"global_batch": WHOLE})
        script.resume(Path(folder), updates)
        told = script.told()
        script = Resuming(steps=2)
        told["unfixed"] = refused(lambda: script.accelerator.load_state(folder))
        script.told()
    return told


def in_flight() -> str:
    """Say what saving between a backward pass and its optimizer step ends with."""
    script, said = Script(), ""
    for _, x, y in script.loader:
        script.accelerator.backward(F.mse_loss(script.model(x), y))
        said = refused(lambda: script.accelerator.save_state("/nonexistent/never-written"))
        break
    script.told()
    return said


def refused(run: Callable[[], object]) -> str:
    """Return the kind and the words of the error that a call ends with."""
    try:
        run()
    except EvenstrideError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def evaluating(rank: int) -> dict[str, Any]:
    """Gather metrics over unequal, missing and empty batches."""
    with launched(rank, 2):
        return {
            f"{size} in {batch}, {parts}": metrics(size, batch, parts)
            for size, batch in SIZES
            for parts in ((1, 3), (0, 1))
        }


SIZES = ((37, 4), (9, 2), (3, 1), (1, 4))


def metrics(size: int, batch: int, parts: tuple[int, ...]) -> dict[str, Any]:
    """Return what an evaluation gathers, as a script does it."""
    accelerator = EvenAccelerator(cpu=True, policy=unequal(2 * BATCH, parts))
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loaders = [
        DataLoader(rows(SAMPLES), batch_size=BATCH, shuffle=True),
        DataLoader(rows(size), batch_size=batch),
        DataLoader(rows(size), batch_size=batch, drop_last=True),
    ]
    model, _, _, loader, other = accelerator.prepare(module, optimizer, *loaders)
    told: dict[str, Any] = {
        "ids": [],
        "texts": [],
        "numbers": 0,
        "sizes": [],
        "other": [],
        "ends": [],
    }
    for ids, x, y in loader:
        with torch.no_grad():
            error = (model(x) - y).square().flatten()
        told["numbers"] += 1
        told["ends"].append(accelerator.gradient_state.end_of_dataloader)
        both = accelerator.gather_for_metrics({"ids": ids, "error": error})
        assert len(both["ids"]) == len(both["error"])
        told["ids"] += both["ids"].tolist()
        told["texts"] += accelerator.gather_for_metrics([str(i) for i in ids.tolist()])
        told["sizes"].append(len(accelerator.gather_for_metrics(error.mean())))
    for ids, _, _ in other:
        told["other"] += accelerator.gather_for_metrics(ids).tolist()
    uneven = torch.arange(accelerator.process_index + 1)
    told["gathered"] = accelerator.gather([uneven, uneven[:1]])[0].tolist()
    told["length"] = len(loader)
    accelerator.free_memory()
    forget()
    return told


def set_up(rank: int) -> dict[str, str]:
    """Return the refusals that need several processes."""
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import find_executable_batch_size

    told = {}
    with launched(rank, 2):
        script = Script()
        told["local"] = refused(lambda: LocalSGD(script.accelerator, script.model, 8))
        script.told()

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size: int) -> None:
            Script(batch=batch_size)

        told["retried"] = refused(train)
        forget()
        with pytest.MonkeyPatch.context() as patch:
            sharded(patch)
            told["FSDP1"] = refused(
                lambda: EvenAccelerator(
                    cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)
                )
            )
            forget()
    return told


def sharded(patch: pytest.MonkeyPatch) -> None:
    """Let Accelerate shard models over CPU processes, which it does on accelerators only."""
    begin = AcceleratorState.__init__

    def begun(state: Any, *args: Any, **options: Any) -> None:
        begin(state, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    patch.setattr(AcceleratorState, "__init__", begun)


def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole; collective."""
    full: Tensor = tensor.full_tensor().detach()
    return full


def fully_sharded(rank: int, folder: str) -> dict[str, Any]:
    """Train with FSDP version 2 in two batches per update; save in the midst, and resume."""
    with launched(rank, 2) as patch:
        sharded(patch)
        told = {"whole": shard_and_train(None, None)}
        told["cut"] = shard_and_train(folder, None)
        told["rest"] = shard_and_train(None, folder)
        forget()
        told["alone"] = alone(20, told["whole"]["rates"])
    return told


SAVED = 4  # updates, in the midst of the second epoch


def shard_and_train(save: str | None, load: str | None) -> dict[str, Any]:
    """Return what came of a sharded run; it ends where it saves."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    script = Sharded(steps=2, options={"fsdp_plugin": plugin})
    if load:
        script.accelerator.load_state(load)
    script.train(range(script.accelerator.stride.epoch, EPOCHS), stop=SAVED if save else None)
    if save:
        script.accelerator.save_state(save)
    told = {
        "gradients": script.gradients,
        "rates": script.rates,
        "weights": script.flat(lambda p: p),
        "sizes": script.sizes,
        "loaded": script.data.indices,
    }
    script.accelerator.free_memory()
    forget()
    return told


class Sharded(Script):
    """A script whose weights and gradients are DTensors."""

    def flat(self, part: Callable[[Any], Any]) -> list[float]:
        """Return a part of each parameter as numbers; collective."""
        parts = [whole(part(p)).reshape(-1) for p in self.model.parameters()]
        return torch.cat(parts).tolist()

    def update(self) -> None:
        """Note whole gradients."""
        if self.accelerator.sync_gradients:
            self.gradients.append(self.flat(lambda p: p.grad))
        self.optimizer.step()
        self.scheduler.step()
        if self.accelerator.sync_gradients:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()


def example(rank: int, folder: str, world_size: int) -> dict[str, Any]:
    """Run the example: at once, in two parts, and with Accelerate alone."""
    from examples import accelerate_loop

    size = 100 // world_size
    small = ("--cpu", "--epochs", "2", "--width", "16", "--batch-size", str(size))
    saving = ("--checkpoint", folder, "--save-every", "20")
    torch.set_default_dtype(torch.float64)
    try:
        with launched(rank, world_size) as patch:
            patch.setenv("EVENSTRIDE_POLICY", unequal(100))
            told = {"whole": printed(accelerate_loop, small)}
            if world_size > 1:
                patch.setenv("EVENSTRIDE_MAX_STEPS", "20")  # of 30
                printed(accelerate_loop, (*small, *saving))
                patch.delenv("EVENSTRIDE_MAX_STEPS")
                told["rest"] = printed(accelerate_loop, (*small, *saving))
                patch.setattr(accelerate_loop, "EvenAccelerator", Accelerator)
                told["plain"] = printed(accelerate_loop, small)
    finally:
        torch.set_default_dtype(torch.float32)
    return told


def printed(module: Any, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return what a run of an example prints, and its weights if it came to its end."""
    out, found = io.StringIO(), None
    # A script ends the process group, which other runs of this process need.
    with (
        patch.object(PartialState, "destroy_process_group"),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        found = weights(module.main(module.arguments().parse_args(list(arguments))))
    forget()
    return {"lines": out.getvalue().splitlines(), "weights": found}
