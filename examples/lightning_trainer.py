"""A LightningModule with a Lightning Trainer, on handwritten digits; one line is evenstride's.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py --accelerator cpu --checkpoint DIR

Needs scikit-learn, which has the digits. docs/how-to/lightning.md explains what changes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from evenstride.integrations.lightning import EvenStrategy


class Digits(L.LightningDataModule):
    """1797 images of 8 x 8 pixels."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32) / 16
        data = TensorDataset(pixels, torch.tensor(labels, dtype=torch.long))
        parts = random_split(data, [1437, 360], torch.Generator().manual_seed(0))
        self.train, self.val = parts

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        self.log("val_loss", F.cross_entropy(scores, y), sync_dist=True)
        self.log("accuracy", (scores.argmax(1) == y).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            found = self.trainer.callback_metrics
            self.print(
                f"epoch {self.current_epoch + 1}: "
                f"validation loss {found['val_loss']:.4f}, accuracy {found['accuracy']:.4f}"
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(args: argparse.Namespace) -> None:
    L.seed_everything(0, verbose=False)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy = EvenStrategy(args.global_batch)  # this line, and the next use of it
    saving = ModelCheckpoint(args.checkpoint, every_n_train_steps=args.save_every, save_last=True)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", devices)) // devices,
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        callbacks=[saving] if args.checkpoint else [],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    resume = "last" if args.checkpoint else None
    trainer.fit(Classifier(args.width), Digits(args.batch_size), ckpt_path=resume)
    if trainer.is_global_zero and strategy.stride is not None:
        print(strategy.stride.summary())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto", help="cpu or cuda")
    parser.add_argument("--precision", default="32-true", help="also 16-mixed, bf16-mixed, 64-true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per batch and device")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update and device")
    parser.add_argument("--global-batch", type=int, help="samples per update over all devices")
    parser.add_argument("--width", type=int, default=1024, help="of the two hidden layers")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=20, help="updates between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
