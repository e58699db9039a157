"""A training loop with Lightning Fabric; numbered comments mark evenstride's lines.

    torchrun --nproc-per-node 2 examples/lightning_fabric.py --accelerator cpu --checkpoint FILE

docs/how-to/lightning.md explains each numbered line.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstride


def rows(samples: int, seed: int) -> Dataset:
    """Return rows of random numbers. The class is the index of the largest of the first ten."""
    numbers = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers[:, :10].argmax(1))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def evaluate(stride: evenstride.Stride, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean loss over the rows of all workers, each counted once."""
    model.eval()
    loss, count = 0.0, 0
    for x, y in loader:
        loss += F.cross_entropy(model(x), y, reduction="sum").item()
        count += len(y)
    model.train()
    return stride.mean(loss, count)  # 7: not fabric.all_reduce, which weights workers equally


def launched(args: argparse.Namespace) -> Fabric:
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator=args.accelerator,
        devices=workers,
        num_nodes=int(os.environ.get("WORLD_SIZE", workers)) // workers,
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        precision=args.precision,
    )
    fabric.launch()
    return fabric


def main(args: argparse.Namespace) -> nn.Module:
    fabric = launched(args)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    stride = evenstride.Stride(args.global_batch)  # 1: samples per step, over all workers
    loader, test_loader = fabric.setup_dataloaders(
        stride.loader(rows(args.samples, seed=1), max_micro_batch=args.max_micro_batch),  # 2
        stride.loader(rows(args.samples // 4, seed=2), train=False),
        use_distributed_sampler=False,  # 3: the loaders already select the samples of this worker
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model, optimizer = fabric.setup(net, optimizer)
    # 4: the DDP module inside Fabric's wrapper, or the plain model with one worker
    parts = (part for part in model.modules() if isinstance(part, DistributedDataParallel))
    engine = stride.watch(next(parts, net))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "stride": stride}
    if args.checkpoint and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)
        fabric.print(f"resuming in epoch {stride.epoch} after {stride.step} steps")

    for epoch in range(stride.epoch, args.epochs):
        for x, y in loader:
            with stride.accumulate(engine):  # 5: instead of fabric.no_backward_sync(model, ...)
                loss = F.cross_entropy(model(x), y)
                fabric.backward(stride.scale(loss))  # 6: the exact gradient for any split
            if stride.synced:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if args.checkpoint and stride.step % args.save_every == 0:
                    fabric.save(args.checkpoint, state)
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        tested = evaluate(stride, model, test_loader)
        fabric.print(f"epoch {epoch + 1}: test loss {tested:.4f}")

    fabric.print(stride.summary())
    stride.close()
    return net


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, ...")
    parser.add_argument("--precision", default="32-true", help="also 16-mixed, bf16-mixed, 64-true")
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--max-micro-batch", type=int, help="largest micro-batch, in samples")
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
