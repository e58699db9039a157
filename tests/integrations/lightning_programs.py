"""Runs of Lightning's Trainer as ranks of one process group: what each came to."""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
)
from torchmetrics.regression import MeanSquaredError

from evenstride.integrations.lightning import EvenStrategy
from tests.multiproc.training import flat, net, rows, weights
from tests.order import epoch_order

SAMPLES, BATCH, EPOCHS, EVALUATED = 44, 4, 2, 11
RATE = 0.05
UNEQUAL = "static:6,2"  # of two ranks with BATCH samples each
Row = tuple[Tensor, Tensor, Tensor]


@contextlib.contextmanager
def launched(rank: int, world_size: int = 2) -> Iterator[pytest.MonkeyPatch]:
    """Look like a rank that torchrun has started."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,  # the process group is there already
            "TORCHELASTIC_RUN_ID": "lightning",
        }.items():
            patch.setenv(name, str(value))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield patch


class Regression(L.LightningModule):  # type: ignore[misc]
    """A module as users write it, that also notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.squares = MeanSquaredError()
        self.seen: list[list[int]] = []  # samples of each training step
        self.evaluated: list[list[int]] = []
        self.gradients: list[list[float]] = []
        self.logged: list[float] = []  # the loss of each step
        self.outputs: list[float] = []
        self.planned = 0

    def loss(self, batch: Row) -> Tensor:
        _, x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.seen.append(batch[0].tolist())
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.logged.append(float(self.trainer.logged_metrics.get("loss_step", 0)))
        self.outputs.append(float(outputs["loss"]))

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.evaluated.append(batch[0].tolist())
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.squares.update(self.net(batch[1]), batch[2])
        self.log("val_squares", self.squares)

    def test_step(self, batch: Row, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Row, batch_idx: int) -> list[int]:
        found: list[int] = batch[0].tolist()
        return found

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        self.planned = int(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.net.parameters(), lr=RATE)


def loader(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(samples), **{"batch_size": BATCH, "shuffle": True, **options})


def evaluation(samples: int = EVALUATED) -> DataLoader[Any]:
    return loader(samples, shuffle=False)


def trainer(strategy: Any, devices: int = 2, **options: Any) -> L.Trainer:
    """Return a Trainer on the CPU, in float64."""
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "precision": "64-true",
        "max_epochs": EPOCHS,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return L.Trainer(**{**usual, "strategy": strategy, **options})


def fitted(
    strategy: EvenStrategy,
    model: Regression | None = None,
    train: Any = None,
    val: Any = None,
    *,
    ckpt_path: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return what a run came to."""
    model, run = model or Regression(), trainer(strategy, **options)
    run.fit(model, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return outcome(run, model)


def outcome(run: L.Trainer, model: Regression) -> dict[str, Any]:
    return {
        "seen": model.seen,
        "evaluated": model.evaluated,
        "gradients": model.gradients,
        "logged": model.logged,
        "weights": weights(model.net),
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "steps": run.global_step,
        "batches": run.fit_loop.total_batch_idx + 1,
        "epochs": run.current_epoch,
        "planned": model.planned,
    }


def alone(
    global_batch: int,
    *,
    shuffle: bool = True,
    first: int = SAMPLES,
    clip: float = 0.0,
    cosine: bool = False,
    seed: int = 0,
    parts: int = 1,
) -> dict[str, Any]:
    """Return what plain PyTorch comes to in one process, with the first samples of each epoch.

    With ``parts``, an update takes so many batches, as loops count them.
    """
    module, data = net(), rows(SAMPLES)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    steps = EPOCHS * -(-first // global_batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gradients, losses = [], []
    for epoch in range(EPOCHS):
        order = epoch_order(seed, epoch, SAMPLES, shuffle=shuffle)[:first]
        for start in range(0, len(order), global_batch):
            _, x, y = data[order[start : start + global_batch]]
            loss = F.mse_loss(module(x), y)
            (loss / parts).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if start // global_batch % parts < parts - 1 and start + global_batch < len(order):
                continue
            gradients.append(flat(module))
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            if cosine:
                scheduler.step()
            optimizer.zero_grad()
    return {
        "gradients": gradients,
        "losses": losses,
        "weights": weights(module),
        "evaluated": evaluated(module),
    }


def evaluated(module: nn.Module) -> float:
    """Return the loss of a module on the evaluation data."""
    _, x, y = rows(EVALUATED)[:]
    return F.mse_loss(module(x), y).item()


def unweighted(rank: int, sizes: tuple[int, int]) -> list[float]:
    """Return the gradient of Lightning's own DDP on a first batch that is split unequally."""
    start = sum(sizes[:rank])
    mine = epoch_order(0, 0, SAMPLES, shuffle=True)[start : start + sizes[rank]].tolist()
    model = Regression()
    run = trainer(DDPStrategy(), max_steps=1, use_distributed_sampler=False)
    run.fit(model, DataLoader(rows(SAMPLES), batch_sampler=[mine]))
    return model.gradients[0]


def exact(rank: int) -> dict[str, Any]:
    """Train with unequal shares: in micro-batches, in one batch each, accumulated."""
    with launched(rank):
        pieces = fitted(EvenStrategy(policy=UNEQUAL), val=evaluation())
        whole = fitted(EvenStrategy(policy=UNEQUAL, max_micro_batch=None), val=evaluation())
        more = EvenStrategy(policy="static:18,6")
        accumulated = fitted(more, val=evaluation(), accumulate_grad_batches=3)
        return {
            "pieces": pieces,
            "whole": whole,
            "accumulated": accumulated,
            "restored": more.lightning_module.trainer.accumulate_grad_batches,
            "wrong": unweighted(rank, (6, 2)),
            "summary": type(more.stride.summary()).__name__ if more.stride else "",
        }


def plain(rank: int) -> dict[str, Any]:
    """Train and evaluate with one process."""
    with launched(rank, 1):
        strategy = EvenStrategy(global_batch=8)
        run = fitted(strategy, val=evaluation(), devices=1)
        return run | {"without": fitted(EvenStrategy(), devices=1)["seen"]}


def saving(folder: str, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, save_last=True
    )


def cut(rank: int, folder: str, every: int) -> dict[str, Any]:
    """Train, and save on the way."""
    with launched(rank):
        options: dict[str, Any] = {
            "enable_checkpointing": True,
            "callbacks": [saving(folder, every)],
        }
        run = fitted(EvenStrategy(policy="static:9,3"), train=loader(batch_size=6), **options)
        return run | {"saved": sorted(path.name for path in Path(folder).iterdir())}


def resumed(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Continue with another number of processes, and another batch size."""
    with launched(rank, world_size):
        strategy = EvenStrategy(policy="uniform")
        return fitted(strategy, ckpt_path=path, devices=world_size, val=evaluation())


class Single(Regression):
    """A module in float32, because autocast leaves float64 as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float32)

    def loss(self, batch: Row) -> Tensor:
        _, x, y = batch
        return F.mse_loss(self.net(x.float()).float(), y.float())


class Scheduled(Regression):
    """A module with a schedule by steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Data(L.LightningDataModule):  # type: ignore[misc]
    """The data of all stages."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return evaluation()

    test_dataloader = predict_dataloader = val_dataloader


class Bar(TQDMProgressBar):  # type: ignore[misc]
    """A progress bar that notes what it shows at the end of an epoch."""

    shown: list[int]

    def on_train_epoch_end(self, *args: Any) -> None:
        self.shown = [self.train_progress_bar.n, self.train_progress_bar.total]
        super().on_train_epoch_end(*args)


class Counted(L.Callback):  # type: ignore[misc]
    """Counts validations apart from the check before training."""

    validations = 0

    def on_validation_end(self, trainer: L.Trainer, _: Any) -> None:
        self.validations += not trainer.sanity_checking


def features(rank: int, folder: str) -> dict[str, Any]:
    """Use what a Trainer offers, each with unequal shares."""
    with launched(rank) as patch:

        def run(model: Regression | None = None, **options: Any) -> dict[str, Any]:
            return fitted(EvenStrategy(policy=UNEQUAL), model, val=evaluation(), **options)

        bar, counted, logger = Bar(), Counted(), CSVLogger(folder)
        stopping = EarlyStopping("val_loss", min_delta=1e9, patience=1)
        found = {
            "clipped": run(
                Scheduled(),
                gradient_clip_val=0.05,
                enable_progress_bar=True,
                callbacks=[bar, LearningRateMonitor("step")],
                logger=logger,
                log_every_n_steps=1,
            ),
            "limited": run(limit_train_batches=3),
            "overfitted": run(overfit_batches=2),
            "reloaded": run(reload_dataloaders_every_n_epochs=1),
            "stopped": run(max_epochs=9, callbacks=[stopping]),
            "ended": run(max_epochs=-1, max_steps=8),
            "rounded": fitted(EvenStrategy(policy=UNEQUAL), Single(), precision="bf16-mixed"),
        }
        strategy = EvenStrategy(policy="static:18,6")
        found["checked"] = fitted(
            strategy,
            val=evaluation(),
            accumulate_grad_batches=3,
            val_check_interval=3,
            callbacks=[counted],
        ) | {"validations": counted.validations}
        patch.setenv("PL_GLOBAL_SEED", "5")  # as seed_everything does
        found["in another order"] = run()
        return found | {"bar": bar.shown, "rates": rates_in(logger) if rank == 0 else []}


def rates_in(logger: CSVLogger) -> list[float]:
    """Return the learning rates that a logger has written."""
    with Path(logger.log_dir, "metrics.csv").open() as lines:
        return [float(row["lr-SGD"]) for row in csv.DictReader(lines) if row["lr-SGD"]]


def stages(rank: int, folder: str) -> dict[str, Any]:
    """Run every entry point of a Trainer, with a LightningDataModule."""
    with launched(rank):
        data, model = Data(), Regression()
        best = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=True)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [best]}
        run = trainer(EvenStrategy(policy=UNEQUAL), **options)
        run.fit(model, datamodule=data)
        after = run.test(model, datamodule=data)[0]["test_loss"]
        run = trainer(EvenStrategy())
        model.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
        loaded = Regression.load_from_checkpoint(best.best_model_path)
        found = {
            "tested after training": after,
            "expected": evaluated(loaded.net),
            "validated": run.validate(Regression(), data, ckpt_path=best.best_model_path)[0][
                "val_loss"
            ],
            "tested": run.test(loaded, datamodule=data)[0]["test_loss"],
        }
        predicted: Any = run.predict(loaded, datamodule=data)
        position = torch.load(best.best_model_path, weights_only=True).get("evenstride")
        return found | {
            "predicted": [index for batch in predicted for index in batch],
            "best": best.best_model_path,
            "weights only": "no position" if position is None else str(position),
        }


class ByHand(Regression):
    """A module that steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.more = net()

    def training_step(self, batch: Row, batch_idx: int) -> None:
        self.seen.append(batch[0].tolist())
        _, x, y = batch
        for module, optimizer in zip((self.net, self.more), self.optimizers(), strict=True):
            loss = F.mse_loss(module(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss, sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=RATE),
            torch.optim.SGD(self.more.parameters(), lr=RATE),
        ]


def by_hand(rank: int) -> dict[str, Any]:
    """Train by manual optimization."""
    with launched(rank):
        model = ByHand()
        strategy = EvenStrategy(policy=UNEQUAL, find_unused_parameters=True)
        run = fitted(strategy, model)
        return run | {
            "weights": weights(model.net) + weights(model.more),
            "alone": 2 * alone(2 * BATCH)["weights"],
        }


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Partly(Regression):
    """A module with parameters that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(1, 1).double()


class Searched(Regression):
    """A module whose learning rate can be searched for."""

    lr = RATE

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


def samples_in(batch: Row) -> float:
    return float(len(batch[0]))


def options(rank: int, folder: str) -> dict[str, Any]:
    """Train with options of DDP, of the loader and of the Stride."""
    with launched(rank):

        def run(model: Regression | None = None, train: Any = None, **even: Any) -> dict[str, Any]:
            return fitted(EvenStrategy(**{"policy": UNEQUAL, **even}), model, train, evaluation())

        searched = Searched()
        search = trainer(
            EvenStrategy(policy=UNEQUAL), default_root_dir=folder, enable_checkpointing=True
        )
        Tuner(search).lr_find(searched, loader(), num_training=5, update_attr=False)
        before = len(searched.seen)
        search.fit(searched, loader())
        again = Regression()
        twice = trainer(EvenStrategy(policy=UNEQUAL), max_epochs=1)
        twice.fit(again, loader())
        twice.fit_loop.max_epochs = 2
        twice.fit(again, loader())
        return {
            "loader processes": run(train=loader(num_workers=1, persistent_workers=True)),
            "static graph": run(static_graph=True),
            "unused parameters": run(Partly(), find_unused_parameters=True),
            "a share of 0": run(policy="static:8,0"),
            "weights": run(weight_fn=samples_in),
            "costs": run(cost_fn=[1.0] * SAMPLES, max_micro_batch=None),
            "searched": outcome(search, searched) | {"before": before},
            "twice": {"steps": twice.global_step, "epochs": twice.current_epoch},
        }


def saved_at_ends(rank: int, folder: str) -> dict[str, Any]:
    """Continue from states at the end of an epoch, and after a last step within one."""
    with launched(rank):

        def run(**options: Any) -> dict[str, Any]:
            return fitted(EvenStrategy(policy=UNEQUAL), **options)

        run(enable_checkpointing=True, callbacks=[saving(folder, 6)])
        model, limited = (
            Regression(),
            trainer(EvenStrategy(policy=UNEQUAL), max_epochs=-1, max_steps=8),
        )
        limited.fit(model, loader())
        limited.save_checkpoint(Path(folder, "limited.ckpt"))
        found = {
            name: run(ckpt_path=Path(folder, f"{name}.ckpt")) for name in ("step=6", "step=12")
        }
        found["limited"] = run(ckpt_path=Path(folder, "limited.ckpt"), max_epochs=-1, max_steps=12)
        return found
