"""A training script for Hugging Face Accelerate. Two lines are evenstride's; they are numbered.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu --checkpoint DIR
    evenstride lab --speeds 1,0.4 --steps 40 -- examples/accelerate_loop.py --cpu

It classifies handwritten digits, 1797 images of the UCI repository that scikit-learn ships. With
`Accelerator` in both lines it runs without evenstride, on equal batches.
"""

import argparse
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


def main(args: argparse.Namespace) -> nn.Module:
    accelerator = EvenAccelerator(  # 2: instead of Accelerator
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
    )
    set_seed(0)
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)
    net = small_net(args.width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    updates = args.epochs * -(-len(train_loader) // args.accumulate)  # of one process
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        net, optimizer, train_loader, test_loader, scheduler
    )

    done, updates_per_epoch = 0, -(-len(train_loader) // args.accumulate)
    if args.checkpoint and (saved := sorted(args.checkpoint.glob("update_*"))):
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name.removeprefix("update_"))
    first, skipped = divmod(done, updates_per_epoch)

    for epoch in range(first, args.epochs):
        loader, losses = train_loader, []
        if epoch == first and skipped:
            loader = accelerator.skip_first_batches(train_loader, skipped * args.accumulate)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                done += 1
                if args.checkpoint and done % args.save_every == 0:
                    accelerator.save_state(str(args.checkpoint / f"update_{done:06}"))

        right, count = 0, 0
        model.eval()
        for x, y in test_loader:
            with torch.no_grad():
                guess = model(x).argmax(1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right, count = right + int((guess == y).sum()), count + len(y)
        model.train()
        mean = sum(losses) / len(losses)
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}, {right} of {count} digits right")

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
