"""Lightning's Trainer with its DDP strategy, without logger, checkpoints and progress bar."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from benchmarks.peers.peer_worker import PeerJob, work
from torch import Tensor
from torch.utils.data import DataLoader


class PeerModule(L.LightningModule):  # type: ignore[misc]
    def __init__(self, job: PeerJob) -> None:
        super().__init__()
        self.job, self.net = job, job.net

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[1]), batch[2])

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], _: int) -> None:
        self.job.note(batch[0], outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.net.parameters())


def train(job: PeerJob) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=job.world,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PeerModule(job), DataLoader(job.data, batch_size=job.size, shuffle=True))


if __name__ == "__main__":
    work(train)
