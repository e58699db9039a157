"""Scripts that would train wrongly, or in vain: each rank's warnings, and what it trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from tests.multiproc.exactness import RATE
from tests.multiproc.logs import logged
from tests.multiproc.refusals import raised
from tests.multiproc.training import flat, net, rows, weights

BATCH, LENGTH, SHARES = 10, 30, "static:3,7"


class Contains(nn.Module):
    """A user's wrapper with the engine inside it."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, x: torch.Tensor) -> Any:
        """Run the engine."""
        return self.engine(x)


class Holds(Contains):
    """A user's wrapper that keeps the engine out of its modules, and the net in them."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__(engine.module)  # type: ignore[arg-type]
        self.held = [engine]

    def forward(self, x: torch.Tensor) -> Any:
        """Run the engine."""
        return self.held[0](x)


def _ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def _compiled(module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


WATCHED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "by hand": lambda module: module,
    "ddp": _ddp,
    "contained": lambda module: Contains(_ddp(module)),
    "held": lambda module: Holds(_ddp(module)),
    "compiled": lambda module: _compiled(_ddp(module)),
    "compiled inside": lambda module: _ddp(_compiled(module)),
    "module inside": _ddp,
}


def _averaged(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def trained(
    rank: int, name: str, *, watch: bool = True, micro: int | None = None
) -> dict[str, Any]:
    """Train an epoch with an engine, or without; return what it came to, and what was said."""
    by_hand = name == "by hand"
    more: Any = {"engine": "none"} if by_hand else {}
    stride = evenstride.Stride(global_batch=BATCH, policy=SHARES, **more)
    loader = stride.loader(rows(LENGTH), max_micro_batch=micro)
    module = net()
    before, gradients = weights(module), []
    model = WATCHED[name](module)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def train() -> None:
        watched = stride.watch(model) if watch else model
        called = module if name == "module inside" else watched
        for _, x, y in loader:
            with stride.accumulate(watched):
                loss = nn.functional.mse_loss(called(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if stride.synced:
                if by_hand:
                    _averaged(module)
                gradients.append(flat(module))
                optimizer.step()
                optimizer.zero_grad()

    with logged() as heard:
        error = raised(train)
    stride.close()
    unchanged = weights(module) == before
    return {"error": error, "gradients": gradients, "heard": heard, "unchanged": unchanged}


def line_of(mark: str) -> str:
    """Return file and number of the line of this module that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if line.endswith(mark))}"


def clipped(rank: int, *, in_pieces: bool) -> list[str]:
    """Clip gradients in every micro-batch, or where the step's gradient is whole."""
    stride = evenstride.Stride(global_batch=BATCH, policy=SHARES)
    loader = stride.loader(rows(LENGTH), max_micro_batch=2)
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with logged() as heard:
        for _, x, y in loader:
            with stride.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if in_pieces:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # in pieces
            if stride.synced:
                if not in_pieces:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    stride.close()
    return heard


class Script:
    """A run that trains, saves in its second epoch, and is made again."""

    def __init__(self, scheduled: bool = False) -> None:
        self.stride = evenstride.Stride(global_batch=BATCH, policy=SHARES)
        self.loader = self.stride.loader(rows(LENGTH))
        self.model = self.stride.watch(DistributedDataParallel(net()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5) if scheduled else None

    def epoch(self, after_step: Callable[[], object] = lambda: None) -> None:
        """Train one epoch."""
        for _, x, y in self.loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            after_step()


def _batches(loader: Any) -> Iterator[Any]:
    yield from loader


def _epochs_from_zero(script: Script) -> None:
    print("going on in epoch", script.stride.epoch)
    for _ in range(2):  # from zero
        script.epoch()


def _epochs_from_zero_inline(script: Script) -> None:
    for _ in range(2):  # from zero, inline
        for _, x, y in script.loader:
            loss = nn.functional.mse_loss(script.model(x), y)
            script.stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            script.optimizer.step()
            script.optimizer.zero_grad()


def _epochs_from_the_restored(script: Script) -> None:
    for _ in range(script.stride.epoch, 3):
        script.epoch()


def _epochs_from_a_variable(script: Script) -> None:
    first = script.stride.epoch
    for _ in range(first, 3):
        script.epoch()


def _epochs_that_are_left(script: Script) -> None:
    left = 3 - script.stride.epoch
    for _ in range(left):
        script.epoch()


def _while_there_are_epochs(script: Script) -> None:
    while script.stride.epoch < 3:
        script.epoch()


def _steps_of_a_generator(script: Script) -> None:
    batches = _batches(script.loader)
    for _ in range(2):
        _, x, y = next(batches)
        loss = nn.functional.mse_loss(script.model(x), y)
        script.stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        script.optimizer.step()
        script.optimizer.zero_grad()
    batches.close()  # type: ignore[attr-defined]


LOOPS = {
    "from zero": _epochs_from_zero,
    "from zero, inline": _epochs_from_zero_inline,
    "from the restored": _epochs_from_the_restored,
    "from a variable": _epochs_from_a_variable,
    "that are left": _epochs_that_are_left,
    "while": _while_there_are_epochs,
    "steps of a generator": _steps_of_a_generator,
}


def restored(rank: int, name: str) -> list[str]:
    """Train an epoch, restore in a new run, and go on by one of the loops."""
    first = Script()
    first.epoch()
    state = first.stride.state_dict()
    first.stride.close()
    script = Script()
    script.stride.load_state_dict(state)
    with logged() as heard:
        LOOPS[name](script)
    script.stride.close()
    return heard


def saved(
    rank: int, folder: str, *, restores: bool, saves_scheduler: bool, otherwise: bool = False
) -> list[str]:
    """Train next to checkpoints of an earlier run; return the warnings of the later one."""
    state: dict[str, Any] = {}
    for attempt in range(2):
        script = Script(scheduled=True)
        if otherwise and attempt:  # from a state that the script has kept itself
            script.stride.load_state_dict(state)
        scheduler = script.scheduler if saves_scheduler or not attempt else None
        checkpoint = evenstride.Checkpointer(
            folder,
            script.stride,
            model=script.model,
            optimizer=script.optimizer,
            scheduler=scheduler,
            every=3,
        )  # the Checkpointer
        with logged() as heard:
            if restores:
                checkpoint.restore()
            script.epoch(checkpoint.step)
            checkpoint.close()
        state = script.stride.state_dict()
        script.stride.close()
    return heard
