"""A small GPT trained by iterations: random pieces of one long text, no data set and no epochs.

    torchrun --nproc-per-node 2 examples/iterations.py --text book.txt

`get_batch` is that of a script for one GPU. Numbered comments mark the lines for evenstride.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_gpt import DEFAULT, GPT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import evenstride


def main(args: argparse.Namespace) -> None:
    data = np.memmap(args.text, dtype=np.uint8, mode="r")

    def get_batch(samples: int) -> tuple[Tensor, Tensor]:  # 1: takes the number of samples
        starts = torch.randint(len(data) - args.context, (samples,)).tolist()
        pieces = np.stack([data[start : start + args.context + 1] for start in starts])
        tokens = torch.from_numpy(pieces.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]

    dist.init_process_group()
    leader = dist.get_rank() == 0
    torch.manual_seed(0)
    net = GPT(args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    stride = evenstride.Stride(args.global_batch)  # 2
    model = stride.watch(DistributedDataParallel(net))  # 3

    for x, y in stride.loader(get_batch, max_steps=args.steps):  # 4: for step in range(steps)
        loss = F.cross_entropy(model(x), y)
        stride.scale(loss).backward()  # 5
        optimizer.step()
        optimizer.zero_grad()
        if stride.step % args.log_every == 0:
            mean = stride.mean(loss.item() * stride.samples, stride.samples)
            if leader:
                print(f"step {stride.step}: loss {mean:.4f} per byte", flush=True)

    if leader:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=DEFAULT, help="file of plain text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--context", type=int, default=64, help="length of a piece, in bytes")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    main(parser.parse_args())
