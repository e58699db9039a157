"""A training loop with Hugging Face Accelerate; numbered comments mark evenstride's lines.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu --checkpoint DIR

docs/how-to/accelerate.md explains each numbered line.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
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
def evaluate(
    accelerator: Accelerator, stride: evenstride.Stride, model: nn.Module, loader: DataLoader
) -> float:
    """Return the mean loss over the rows of all workers, each counted once."""
    model.eval()
    loss, count = 0.0, 0
    for batch in loader:
        x, y = send_to_device(batch, accelerator.device)
        loss += F.cross_entropy(model(x), y, reduction="sum").item()
        count += len(y)
    model.train()
    return stride.mean(loss, count)  # 9: not gather_for_metrics, which requires equal batches


def main(args: argparse.Namespace) -> nn.Module:
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        step_scheduler_with_optimizer=False,  # 1: the global batch is the same for any world size
    )
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train_set = rows(args.samples, seed=1)

    stride = evenstride.Stride(args.global_batch)  # 2: samples per step, over all workers
    loader = stride.loader(train_set, max_micro_batch=args.max_micro_batch)  # 3: a DataLoader
    test_loader = stride.loader(rows(args.samples // 4, seed=2), train=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    # 4: without the loaders, which already select the samples of this worker
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    stride.watch(model)  # 5: the same model, now timed
    accelerator.register_for_checkpointing(stride)  # 6: save_state() saves the position in the data
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(str(args.checkpoint))
        accelerator.print(f"resuming in epoch {stride.epoch} after {stride.step} steps")

    for epoch in range(stride.epoch, args.epochs):
        for batch in loader:
            x, y = send_to_device(batch, accelerator.device)  # prepared loaders do this themselves
            with stride.accumulate(model):  # 7: instead of accelerator.accumulate(model)
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(stride.scale(loss))  # 8: the exact gradient for any split
            if stride.synced:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if args.checkpoint and stride.step % args.save_every == 0:
                    accelerator.save_state(str(args.checkpoint))
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        tested = evaluate(accelerator, stride, model, test_loader)
        accelerator.print(f"epoch {epoch + 1}: test loss {tested:.4f}")

    accelerator.print(stride.summary())
    stride.close()
    return net


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cpu", action="store_true", help="train on the CPU even if there is a GPU"
    )
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--max-micro-batch", type=int, help="largest micro-batch, in samples")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
