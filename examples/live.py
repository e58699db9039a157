"""Training that goes on when a worker is killed, and takes it in again. Experimental.

pip install torchft
torchft_lighthouse --min_replicas 1 --join_timeout_ms 5000 &
for worker in a b c; do
  while ! python examples/live.py --name $worker; do sleep 1; done &
done

Kill one of them and watch the others: the same batches, the same weights.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def main(name: str | None, lighthouse: str, host: str, samples: int, epochs: int) -> None:
    from evenstride.integrations.torchft import LiveStride  # here: --help needs no torchft

    torch.manual_seed(0)  # all that start together must start from equal weights
    rows = torch.randn(samples, 64)
    dataset = TensorDataset(rows, rows[:, :10].argmax(1))  # which of ten numbers is the largest?
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    stride = LiveStride(global_batch=1024, name=name, lighthouse=lighthouse, host=host)
    loader = stride.loader(dataset)
    model = stride.watch(net)  # the plain module: no DistributedDataParallel
    optimizer = stride.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    while stride.epoch < epochs:  # not `for`: who comes back begins where the others are
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()  # if no worker died in this step; else its batch comes again
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
    parser.add_argument("--name", help="of this worker; REPLICA_GROUP_ID if not given")
    parser.add_argument("--lighthouse", default="http://localhost:29510")
    parser.add_argument("--host", default="localhost", help="where the others reach this one")
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
