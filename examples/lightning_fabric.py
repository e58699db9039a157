"""A training loop with Lightning Fabric, on handwritten digits; one line is evenstride's.

    torchrun --nproc-per-node 2 examples/lightning_fabric.py --accelerator cpu --checkpoint FILE

Needs scikit-learn, which has the digits. docs/how-to/lightning.md explains what changes.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from evenstride.integrations.lightning import EvenFabricStrategy


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of 1437 images of 8 x 8 pixels to learn, and of 360 to test."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32) / 16
    data = TensorDataset(pixels, torch.tensor(labels, dtype=torch.long))
    train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def classifier(width: int) -> nn.Module:
    hidden = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, 10))


@torch.no_grad()
def tested(fabric: Fabric, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the samples of all devices."""
    model.eval()
    sums = torch.zeros(2, device=fabric.device)
    for x, y in loader:
        scores = model(x)
        sums[0] += F.cross_entropy(scores, y, reduction="sum")
        sums[1] += (scores.argmax(1) == y).sum()
    model.train()
    loss, right = fabric.all_reduce(sums, reduce_op="sum") / len(loader.dataset)  # type: ignore[arg-type]
    return float(loss), float(right)


def launched(args: argparse.Namespace) -> Fabric:
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(
        strategy=EvenFabricStrategy(args.global_batch),  # this line
        accelerator=args.accelerator,
        devices=devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", devices)) // devices,
        precision=args.precision,
    )
    fabric.launch()
    return fabric


def main(args: argparse.Namespace) -> None:
    seed_everything(0, verbose=False)
    fabric = launched(args)
    net = classifier(args.width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    train, test = fabric.setup_dataloaders(*loaders(args.batch_size))
    state = {"model": model, "optimizer": optimizer}
    stride = fabric.strategy.stride
    if args.checkpoint and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)
        fabric.print(f"resuming in epoch {stride.epoch} after {stride.step} steps")

    for epoch in range(stride.epoch, args.epochs):
        for x, y in train:
            fabric.backward(F.cross_entropy(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if args.checkpoint and stride.step % args.save_every == 0:
                fabric.save(args.checkpoint, state)
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        loss, accuracy = tested(fabric, model, test)
        fabric.print(f"epoch {epoch + 1}: test loss {loss:.4f}, accuracy {accuracy:.4f}")
    fabric.print(stride.summary())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto", help="cpu or cuda")
    parser.add_argument("--precision", default="32-true", help="also 16-mixed, bf16-mixed, 64-true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per batch and device")
    parser.add_argument("--global-batch", type=int, help="samples per batch over all devices")
    parser.add_argument("--width", type=int, default=1024, help="of the two hidden layers")
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoint")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
