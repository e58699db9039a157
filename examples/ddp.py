"""The twenty-line DDP loop, with evenstride's four lines marked.

torchrun --nproc-per-node 2 examples/ddp.py
evenstride lab --speeds 1,0.5,0.25 -- examples/ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evenstride


def main(epochs: int = 2) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(16384, 256), torch.randint(10, (16384,)))
    net = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    stride = evenstride.Stride(global_batch=512)  # 1
    loader = stride.loader(dataset)  # 2, instead of DataLoader and DistributedSampler
    model = stride.watch(DistributedDataParallel(net))  # 3

    for epoch in range(stride.epoch, epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()  # 4
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
