"""Live mode: training continues when a worker is killed, and the worker can rejoin. Experimental.

    pip install torchft
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 5000 &
    for worker in a b c; do
      while ! python examples/live.py --name $worker; do sleep 1; done &
    done

Kill one worker: the others continue with the same batches and the same weights.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def main(name: str | None, lighthouse: str, host: str, samples: int, epochs: int) -> None:
    from evenstride.integrations.torchft import LiveStride  # here, so that --help works without it

    torch.manual_seed(0)  # workers that start together need equal initial weights
    rows = torch.randn(samples, 64)
    dataset = TensorDataset(rows, rows[:, :10].argmax(1))  # class: the largest of ten numbers
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    stride = LiveStride(global_batch=1024, name=name, lighthouse=lighthouse, host=host)
    loader = stride.loader(dataset)
    model = stride.watch(net)  # the plain module, without DistributedDataParallel
    optimizer = stride.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    while stride.epoch < epochs:  # not `for`: a worker that rejoins enters the current epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()  # no update if a worker died in this step; the batch is repeated
            optimizer.zero_grad()
            if stride.committed and stride.step % 10 == 0:
                split = "/".join(map(str, stride.shares))
                print(f"{name}: step {stride.step}, loss {loss.item():.3f}, shares {split}")

    print(
        f"{name}: {stride.step} steps, checksum {sum(p.sum().item() for p in net.parameters()):.6f}"
    )
    stride.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", help="name of this worker (default: REPLICA_GROUP_ID)")
    parser.add_argument("--lighthouse", default="http://localhost:29510")
    parser.add_argument("--host", default="localhost", help="address of this worker")
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
