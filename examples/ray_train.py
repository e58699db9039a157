"""A TorchTrainer of Ray Train; numbered comments mark the lines that evenstride adds or replaces.

Start it on a Ray cluster, or on this machine; or in Ray's local mode, with three unequal workers:

    python examples/ray_train.py --workers 2
    evenstride lab --speeds 1,0.5,0.25 -- examples/ray_train.py

The data are the handwritten digits of scikit-learn. A run with the same --name and --storage
continues from its last checkpoint, with any number of workers.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstride.integrations.ray import prepare  # 1


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 8 x 8 images, and their digits."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def train_fn(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    train_set, test_set = digits()
    loader = DataLoader(train_set, batch_size=config["batch"], shuffle=True)
    net = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    # 2: instead of prepare_data_loader and prepare_model
    stride, loader, model = prepare(loader, net, global_batch=config["global_batch"])
    tests = stride.loader(test_set, train=False)  # 3: each image once over all workers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stride.restore(model=model, optimizer=optimizer)  # 4: if Ray restarts the run

    for epoch in range(stride.epoch, config["epochs"]):  # 5: instead of range(epochs)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()  # 6: the exact gradient for any split
            optimizer.step()
            if stride.save_due(every=config["save_every"]):  # 7: also before a preemption
                stride.report({"step": stride.step}, model=model, optimizer=optimizer)
        model.eval()
        right, device = 0, ray.train.torch.get_device()
        with torch.no_grad():
            for x, y in tests:
                right += int((model(x.to(device)).argmax(1) == y.to(device)).sum())
        accuracy = stride.mean(right, len(test_set)) * ray.train.get_context().get_world_size()
        # 8: instead of ray.train.report
        stride.report({"epoch": epoch + 1, "accuracy": accuracy}, model=model, optimizer=optimizer)


def main(args: argparse.Namespace) -> None:
    by_torchrun = "WORLD_SIZE" in os.environ  # then Ray trains in these processes
    if not by_torchrun:
        ray.init(address=args.address, include_dashboard=None if args.address else False)
    workers = args.workers if args.least is None else (args.least, args.workers)
    result = TorchTrainer(
        train_fn,
        train_loop_config={
            "batch": args.batch,
            "global_batch": args.global_batch,
            "epochs": args.epochs,
            "save_every": args.save_every,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=0 if by_torchrun else workers, use_gpu=args.gpu
        ),
        run_config=ray.train.RunConfig(
            name=args.name,
            storage_path=str(args.storage.absolute()) if args.storage else None,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"the last report: {result.metrics}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", help="of a Ray cluster; without it, Ray starts one here")
    parser.add_argument("--workers", type=int, default=2, help="most workers")
    parser.add_argument("--least", type=int, help="fewest workers, for elastic training")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--batch", type=int, default=256, help="samples per step and worker")
    parser.add_argument("--global-batch", type=int, help="samples per step over all workers")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--name", help="of the run; the same name continues it")
    parser.add_argument("--storage", type=Path, help="folder that all nodes share")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
