"""A training script for Hugging Face Accelerate. Two lines are evenstride's; they are numbered.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu --checkpoint DIR
    evenstride lab --speeds 1,0.4 --steps 40 -- examples/accelerate_loop.py --cpu

It classifies handwritten digits, 1797 images of the UCI repository that scikit-learn ships. With
`Accelerator` in both lines it runs without evenstride, on equal batches.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstride.integrations.accelerate import EvenAccelerator  # 1: accelerate import Accelerator


def digits() -> tuple[Dataset, Dataset]:
    """Return images of 8 x 8 pixels with their digits, for training and for evaluation."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.get_default_dtype()) / 16, torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def small_net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


@torch.no_grad()
def evaluate(accelerator: EvenAccelerator, model: nn.Module, loader: DataLoader) -> str:
    """Return how many digits are right; each counts once, whatever process evaluates it."""
    right, count = 0, 0
    model.eval()
    for x, y in loader:
        guess, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right, count = right + int((guess == y).sum()), count + len(y)
    model.train()
    return f"{right} of {count} digits right"


def main(args: argparse.Namespace) -> nn.Module:
    accelerator = EvenAccelerator(  # 2: Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
    )
    set_seed(0)
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    net = small_net(args.width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    updates = args.epochs * math.ceil(len(train_loader) / args.accumulate)  # of one process
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        net, optimizer, train_loader, DataLoader(test_set, batch_size=256), scheduler
    )
    done = 0
    if args.checkpoint and (saved := sorted(args.checkpoint.glob("update_*"))):
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name.removeprefix("update_"))
    first, skipped = divmod(done, math.ceil(len(train_loader) / args.accumulate))
    loader = accelerator.skip_first_batches(train_loader, skipped * args.accumulate)

    for epoch in range(first, args.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if args.checkpoint and accelerator.sync_gradients and done % args.save_every == 0:
                accelerator.save_state(str(args.checkpoint / f"update_{done:06}"))
        loader = train_loader
        accelerator.print(f"epoch {epoch + 1}: {evaluate(accelerator, model, test_loader)}")

    accelerator.end_training()
    return net


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, even with a GPU")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="samples of one process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--width", type=int, default=1024, help="neurons of each hidden layer")
    parser.add_argument("--checkpoint", type=Path, help="folder of the saved states")
    parser.add_argument("--save-every", type=int, default=50, help="updates between saved states")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
