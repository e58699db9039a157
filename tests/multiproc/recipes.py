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


def until_saved(whole: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a run until the state from which another one went on to the same end."""
    kept = len(whole["loaded"]) - len(rest["loaded"])
    losses = whole["losses"][: -len(rest["losses"])]
    return whole | {"loaded": whole["loaded"][:kept], "losses": losses}


def fabric(rank: int, folder: str) -> dict[str, Any]:
    """Run the recipe for Fabric."""
    recipe = Recipe("lightning_fabric", ("--accelerator", "cpu", "--precision", "64-true"))
    with launched(rank, recipe) as patch:
        reported = {"alone": recipe.alone(), "whole": recipe.run()}
        reported["pieces"] = recipe.run("--max-micro-batch", 2)
        reported["resumed"] = cut_and_rest(recipe, patch, Path(folder, "saved"))
    return reported


def trainer(rank: int, folder: str) -> dict[str, Any]:
    """Run the recipe for Lightning's Trainer."""
    recipe = Recipe("lightning_trainer", ("--accelerator", "cpu", "--precision", "64-true"))
    trainer_of, loader = recipe.module.L.Trainer, evenstride.Stride.loader

    def resharding(**options: Any) -> Any:
        return trainer_of(**{**options, "use_distributed_sampler": True})

    def in_pieces(stride: evenstride.Stride, *args: Any, train: bool = True, **options: Any) -> Any:
        micro = 2 if train else None
        return loader(stride, *args, train=train, max_micro_batch=micro, **options)

    with launched(rank, recipe) as patch:
        checkpoint = ("--checkpoint", Path(folder, "saved"), "--save-every", CUT_AFTER)
        reported = {"alone": recipe.alone(), "whole": recipe.run(*checkpoint)}
        rest = recipe.run(*checkpoint)  # from the state that a Trainer saved last, in mid-epoch
        reported["resumed"] = joined(until_saved(reported["whole"], rest), rest)
        reported["next epoch"] = cut_and_rest(recipe, patch, Path(folder, "epoch"), STEPS_IN_EPOCH)
        reported["twice"] = recipe.run("--accumulate", 2)
        reported["twice alone"] = recipe.alone(accumulate=2)
        with patch.context() as wrong:
            wrong.setattr(recipe.module.L, "Trainer", resharding)
            reported["resharded"] = {"error": refusal(wrong, recipe.run)}
        with patch.context() as wrong:
            wrong.setattr(evenstride.Stride, "loader", in_pieces)
            reported["pieces"] = {"error": refusal(wrong, recipe.run)}
    return reported


class Stages:
    """The entry points of a Trainer, each on a fresh one.

    Args:
        recipe: the example.
        folder: for its checkpoints.
        by_datamodule: whether a LightningDataModule keeps the loaders.
    """

    def __init__(self, recipe: Recipe, folder: str, *, by_datamodule: bool) -> None:
        self.recipe, self.loaded = recipe, dict[int, list[int]]({1: [], 2: [], 3: []})
        given = (*SIZE, *recipe.more, "--checkpoint", folder, "--save-every", CUT_AFTER)
        self.args = recipe.module.arguments().parse_args([str(one) for one in given])
        self.kind: Any = recipe.module.Classifier
        self.data: Any = None
        if by_datamodule:
            self.kind, self.data = _parted(recipe.module)

    def recorded(self, samples: int, seed: int) -> Any:
        """Return what the example's ``rows`` does; what is loaded of each set shows."""
        return Recorded(self.recipe.rows(samples, seed), self.loaded[seed])

    def fresh(self, model: Any = None) -> tuple[Any, Any, dict[str, Any]]:
        """Return a Trainer, a model, and what to give the one with the other."""
        more = {"datamodule": self.data(self.args)} if self.data else {}
        return self.recipe.module.trainer_for(self.args), model or self.kind(self.args), more

    def of(self, seed: int, run: Callable[[], Any]) -> dict[str, Any]:
        """Return what was loaded of a set in a stage, and what came of it."""
        self.loaded[seed].clear()
        came = run()
        return {"loaded": [*self.loaded[seed]], "came": came}


def stages(rank: int, folder: str, *, by_datamodule: bool) -> dict[str, Any]:
    """Run every entry point of a Trainer; return what each loaded, and came to."""
    recipe = Recipe("lightning_trainer", ("--accelerator", "cpu", "--precision", "64-true"))
    reported: dict[str, Any] = {}
    with launched(rank, recipe) as patch, contextlib.redirect_stdout(io.StringIO()):
        on = Stages(recipe, folder, by_datamodule=by_datamodule)
        patch.setattr(recipe.module, "rows", on.recorded)

        trainer, model, data = on.fresh()
        reported["fit"] = on.of(1, lambda: trainer.fit(model, **data)) | {
            "weights": weights(model.net)
        }
        reported["test after fit"] = on.of(3, lambda: trainer.test(model, **data))
        model.stride.close()

        (saved,) = Path(folder).glob("epoch*.ckpt")  # in the midst of the second epoch
        trainer, model, data = on.fresh()
        reported["validate"] = on.of(2, lambda: trainer.validate(model, ckpt_path=saved, **data))
        reported["resume"] = on.of(1, lambda: trainer.fit(model, ckpt_path=saved, **data))
        reported["resume"]["weights"] = weights(model.net)
        model.stride.close()

        loaded = on.kind.load_from_checkpoint(saved, args=on.args)
        reported["saved"] = weights(loaded.net)
        trainer, model, data = on.fresh(loaded)
        reported["test"] = on.of(3, lambda: trainer.test(model, **data))
        reported["predict"] = on.of(3, lambda: sum(map(len, trainer.predict(model, **data))))
        model.stride.close()
    return reported


def _parted(example: Any) -> tuple[type[Any], type[Any]]:
    """Return the example's module, and a LightningDataModule that has what is about data."""
    base: Any = example.L.LightningDataModule

    class Data(base):  # type: ignore[misc]
        stride: evenstride.Stride

        def __init__(self, args: Any) -> None:
            super().__init__()
            self.args = args

        setup = example.Classifier.setup
        train_dataloader = example.Classifier.train_dataloader
        val_dataloader = example.Classifier.val_dataloader
        test_dataloader = example.Classifier.test_dataloader
        predict_dataloader = example.Classifier.predict_dataloader

        def state_dict(self) -> dict[str, Any]:
            return self.stride.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.trainer.state.fn == "fit":
                self.stride.load_state_dict(state)

    class Model(example.Classifier):  # type: ignore[misc]
        @property
        def stride(self) -> evenstride.Stride:
            found: evenstride.Stride = self.trainer.datamodule.stride
            return found

        def setup(self, stage: str) -> None:
            del stage

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint

        on_load_checkpoint = on_save_checkpoint

    return Model, Data
