"""A LightningModule with a Lightning Trainer; numbered comments mark evenstride's lines.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py --accelerator cpu --checkpoint DIR

docs/how-to/lightning.md explains each numbered line.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstride
from evenstride.integrations.lightning import TrainerLoader


def rows(samples: int, seed: int) -> Dataset:
    """Return rows of random numbers. The class is the index of the largest of the first ten."""
    numbers = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers[:, :10].argmax(1))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Classifier(L.LightningModule):
    stride: evenstride.Stride

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.net = args, small_net()

    def setup(self, stage: str) -> None:  # the first hook after the process group exists
        if not hasattr(self, "stride"):  # "fit", "validate" and "test" use the same one
            self.stride = evenstride.Stride(self.args.global_batch)  # 1: over all workers

    def train_dataloader(self) -> TrainerLoader:
        loader = self.stride.loader(rows(self.args.samples, seed=1))  # 2: instead of DataLoader
        return TrainerLoader(self.stride, loader)  # 3: adapts it to the Trainer

    def val_dataloader(self) -> DataLoader:
        return self.stride.loader(rows(self.args.samples // 4, seed=2), train=False)  # 4

    def test_dataloader(self) -> DataLoader:
        return self.stride.loader(rows(self.args.samples // 4, seed=3), train=False)

    def predict_dataloader(self) -> TrainerLoader:  # prevents Lightning from re-creating the loader
        loader = self.stride.loader(rows(self.args.samples // 4, seed=3), train=False)
        return TrainerLoader(self.stride, loader)

    def on_train_start(self) -> None:
        self.stride.watch(self.trainer.strategy.model)  # 5: DistributedDataParallel exists now

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        return self.stride.scale(loss)  # 6: the exact gradient for any split

    def on_validation_epoch_start(self) -> None:
        self.loss, self.count = 0.0, 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.loss += F.cross_entropy(self.net(x), y, reduction="sum").item()
        self.count += len(y)

    def on_validation_epoch_end(self) -> None:
        mean = self.stride.mean(self.loss, self.count)  # 7: each row counts once
        self.log("val_loss", mean, sync_dist=True)  # the same number on all workers
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch + 1}: validation loss {mean:.4f}")

    def on_test_epoch_start(self) -> None:
        self.loss, self.count = 0.0, 0

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.log("test_loss", self.stride.mean(self.loss, self.count), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        return self.net(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stride"] = self.stride.state_dict()  # 8: the position in the data

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # 9: evaluation and load_from_checkpoint() need the weights only
        if hasattr(self, "stride") and self.trainer.state.fn == "fit":
            self.stride.load_state_dict(checkpoint["stride"])


def trainer_for(args: argparse.Namespace) -> L.Trainer:
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    saving = ModelCheckpoint(args.checkpoint, every_n_train_steps=args.save_every, save_last=True)
    return L.Trainer(
        accelerator=args.accelerator,
        devices=workers,
        num_nodes=int(os.environ.get("WORLD_SIZE", workers)) // workers,
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=args.accumulate,
        use_distributed_sampler=False,  # 10: the loaders already select the samples of this worker
        callbacks=[saving] if args.checkpoint else [],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )


def main(args: argparse.Namespace) -> nn.Module:
    model, trainer = Classifier(args), trainer_for(args)
    trainer.fit(model, ckpt_path="last" if args.checkpoint else None)
    if trainer.is_global_zero:
        print(model.stride.summary())
    model.stride.close()
    return model.net


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, ...")
    parser.add_argument("--precision", default="32-true", help="also 16-mixed, bf16-mixed, 64-true")
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--accumulate", type=int, default=1, help="global batches per update")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=50, help="updates between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
