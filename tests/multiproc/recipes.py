"""The recipes for other frameworks, run as ranks of one process group: what each came to."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import evenstride
from tests.multiproc.training import weights
from tests.order import epoch_order

SAMPLES, BATCH, EPOCHS, SHARES = 44, 10, 2, (3, 7)
STEPS_IN_EPOCH = -(-SAMPLES // BATCH)
CUT_AFTER = STEPS_IN_EPOCH + 2  # steps: in the midst of the second epoch
SIZE = ("--samples", SAMPLES, "--epochs", EPOCHS, "--global-batch", BATCH)


class Recorded(Dataset[Any]):
    """A data set that notes which of its samples are loaded."""

    def __init__(self, data: Any, loaded: list[int]) -> None:
        self.data, self.loaded = data, loaded

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return self.data[index]


@dataclass
class Recipe:
    """An example that ranks of the pool run, on a training set that notes what is loaded."""

    name: str
    more: tuple[object, ...] = ()
    loaded: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module: Any = importlib.import_module(f"examples.{self.name}")
        self.rows = self.module.rows

    def recorded(self, samples: int, seed: int) -> Any:
        """Return what the example's ``rows`` does; of the training set, what is loaded shows."""
        data = self.rows(samples, seed)
        return Recorded(data, self.loaded) if seed == 1 else data

    def run(self, *more: object) -> dict[str, Any]:
        """Return what one run of the example came to, as plain data."""
        self.loaded.clear()
        given = [str(one) for one in (*SIZE, *self.more, *more)]
        out = io.StringIO()
        net = None  # of a run that a limit of steps has ended
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            net = self.module.main(self.module.arguments().parse_args(given))
        losses = [
            float(loss) for loss in re.findall(r"(?:test|validation) loss ([\d.]+)", out.getvalue())
        ]
        reported = {"loaded": [*self.loaded], "losses": losses}
        return reported if net is None else {"weights": weights(net), **reported}

    def alone(self, accumulate: int = 1) -> dict[str, Any]:
        """Return what one process comes to in plain PyTorch, on the union of the batches."""
        net, data = self.module.small_net(), self.rows(SAMPLES, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        updates = EPOCHS * -(-STEPS_IN_EPOCH // accumulate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        losses = []
        for epoch in range(EPOCHS):
            order = epoch_order(0, epoch, SAMPLES, shuffle=True)
            for step in range(STEPS_IN_EPOCH):
                x, y = data[order[step * BATCH : (step + 1) * BATCH]]
                (F.cross_entropy(net(x), y) / accumulate).backward()  # type: ignore[no-untyped-call]
                if (step + 1) % accumulate and step + 1 < STEPS_IN_EPOCH:
                    continue
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            x, y = self.rows(SAMPLES // 4, 2)[:]
            losses.append(F.cross_entropy(net(x), y).item())
        return {"weights": weights(net), "losses": losses}


@contextlib.contextmanager
def launched(rank: int, recipe: Recipe) -> Iterator[pytest.MonkeyPatch]:
    """Look like a rank that torchrun has started, with given shares and in float64."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": len(SHARES),
            "LOCAL_WORLD_SIZE": len(SHARES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,  # the process group is there already
            "OMP_NUM_THREADS": 1,
            "TORCHELASTIC_RUN_ID": "recipes",
            "EVENSTRIDE_POLICY": "static:" + ",".join(map(str, SHARES)),
        }.items():
            patch.setenv(name, str(value))
        patch.setattr(recipe.module, "rows", recipe.recorded)
        torch.set_default_dtype(torch.float64)
        try:
            yield patch
        finally:
            torch.set_default_dtype(torch.float32)


def refusal(patch: pytest.MonkeyPatch, run: Callable[[], object]) -> str:
    """Return the kind and the words of the error that a run ends with."""
    made: list[evenstride.Stride] = []
    begin = evenstride.Stride.__init__

    def noted(stride: evenstride.Stride, *args: Any, **options: Any) -> None:
        begin(stride, *args, **options)
        made.append(stride)

    patch.setattr(evenstride.Stride, "__init__", noted)
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for stride in made:
            stride.close()
    return "no error"


def cut_and_rest(
    recipe: Recipe, patch: pytest.MonkeyPatch, saved: Path, after: int = CUT_AFTER
) -> dict[str, Any]:
    """Run some steps, to the midst of an epoch, and then from what was saved there to the end."""
    checkpoint = ("--checkpoint", saved, "--save-every", after)
    patch.setenv("EVENSTRIDE_MAX_STEPS", str(after))
    cut = recipe.run(*checkpoint)
    patch.delenv("EVENSTRIDE_MAX_STEPS")
    return joined(cut, recipe.run(*checkpoint))


def joined(cut: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a run that was cut, and another one that went on from there."""
    added = {name: cut[name] + rest[name] for name in ("loaded", "losses")}
    return rest | added | {"rest": len(rest["loaded"])}


def accelerate(rank: int, folder: str) -> dict[str, Any]:
    """Run the recipe for Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    recipe = Recipe("accelerate_loop", ("--cpu",))
    loader = evenstride.Stride.loader

    def prepares(which: bool) -> Callable[..., Any]:
        def prepared(
            stride: evenstride.Stride, *args: Any, train: bool = True, **options: Any
        ) -> Any:
            made = loader(stride, *args, train=train, **options)
            return Accelerator(cpu=True).prepare(made) if train is which else made

        return prepared

    with launched(rank, recipe) as patch:
        try:
            reported = {"alone": recipe.alone(), "whole": recipe.run()}
            reported["pieces"] = recipe.run("--max-micro-batch", 2)
            reported["resumed"] = cut_and_rest(recipe, patch, Path(folder, "saved"))
            for name, which in (("prepared", True), ("evaluation prepared", False)):
                patch.setattr(evenstride.Stride, "loader", prepares(which))
                reported[name] = {"error": refusal(patch, recipe.run)}
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    return reported
