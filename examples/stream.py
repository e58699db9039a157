"""A small GPT on a stream of text: packed sequences of equal length, from data without a length.

    torchrun --nproc-per-node 2 examples/stream.py --text book.txt --test another.txt

The texts are read line by line, and each sequence is filled with as many lines as needed. Their
number is not known: each rank finds the end of an epoch by itself, in the same step as the others.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_gpt import DEFAULT, GPT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenstride


def sequences(files: list[Path], context: int) -> Iterator[bytes]:
    """Yield the text of all files in sequences of ``context + 1`` bytes."""
    left = b""
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                left += line
                while len(left) > context:
                    yield left[: context + 1]
                    left = left[context:]


def as_tokens(sequence: bytes) -> Tensor:
    return torch.tensor(list(sequence))


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def stream_of(files: list[Path], context: int) -> evenstride.Stream:
    def read(_: int, skip: int) -> Iterator[bytes]:  # the epoch does not matter here
        return islice(sequences(files, context), skip, None)

    return evenstride.Stream(read, transform=as_tokens)


@torch.no_grad()
def evaluate(stride: evenstride.Stride, net: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss per byte over the batches of all workers."""
    loss, sequences = 0.0, 0
    for tokens in loader:
        loss += loss_of(net, tokens).item() * len(tokens)
        sequences += len(tokens)
    return stride.mean(loss, sequences)


def main(args: argparse.Namespace) -> None:
    dist.init_process_group()
    leader = dist.get_rank() == 0
    torch.manual_seed(0)
    net = GPT(args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    stride = evenstride.Stride(args.global_batch)
    loader = stride.loader(stream_of(args.text, args.context))
    test_loader = stride.loader(stream_of(args.test, args.context), train=False)
    model = stride.watch(DistributedDataParallel(net))

    for epoch in range(stride.epoch, args.epochs):
        for tokens in loader:
            loss = loss_of(model, tokens)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stride.step % args.log_every == 0:
                mean = stride.mean(loss.item() * stride.samples, stride.samples)
                if leader:
                    print(f"step {stride.step}: loss {mean:.4f} per byte", flush=True)
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        test_loss = evaluate(stride, net, test_loader)
        if leader:
            print(f"epoch {epoch}: test loss {test_loss:.4f} per byte", flush=True)

    if leader:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, nargs="+", default=[DEFAULT], help="files of text")
    parser.add_argument("--test", type=Path, nargs="+", default=[DEFAULT.with_name("test.txt")])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--context", type=int, default=64, help="length of a sequence, in bytes")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    main(parser.parse_args())
