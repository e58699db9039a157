"""Lightning runs of ranks of one process group: what each came to."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from evenstride.integrations.lightning import EvenStrategy
from tests.multiproc.training import flat, net, rows, weights

SAMPLES, BATCH, EPOCHS = 44, 4, 2
SHARES = "static:6,2"


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


class Regression(L.LightningModule):
    """A module that notes what it is given and its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.seen: list[list[int]] = []  # samples of each training step
        self.evaluated: list[list[int]] = []
        self.gradients: list[list[float]] = []

    def loss(self, batch: Any) -> Any:
        _, x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].tolist())
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(batch[0].tolist())
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(strategy: Any, world_size: int = 2, **options: Any) -> L.Trainer:
    """Return a Trainer on the CPU in float64."""
    usual = {
        "accelerator": "cpu",
        "devices": world_size,
        "precision": "64-true",
        "max_epochs": EPOCHS,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return L.Trainer(**{**usual, "strategy": strategy, **options})


def loader(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(samples), **{"batch_size": BATCH, "shuffle": True, **options})


def first(rank: int) -> Any:
    with launched(rank):
        model, strategy = Regression(), EvenStrategy(policy=SHARES)
        run = trainer(strategy)
        run.fit(model, loader(), DataLoader(rows(11), batch_size=BATCH))
        return {
            "seen": model.seen, "gradients": model.gradients, "evaluated": model.evaluated,
            "metrics": {k: float(v) for k, v in run.callback_metrics.items()},
            "weights": weights(model.net), "steps": run.global_step,
        }
