"""A small GPT on bytes of text, with padded sequences, token weights and micro-batches.

    torchrun --nproc-per-node 2 examples/tiny_gpt.py --text book.txt another.txt

Each line of text is a sequence, and each micro-batch is padded to its longest sequence. The loss is
the mean over the real tokens of all workers, for any split.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import evenstride

DEFAULT = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "wikitext-2", "valid.txt")
PAD = -100  # a target that cross_entropy ignores

Batch = tuple[Tensor, Tensor]


def sequences(files: list[Path], context: int) -> Iterator[Tensor]:
    """Yield the bytes of each line, long lines in pieces of ``context`` targets."""
    for file in files:
        if not file.is_file():
            raise SystemExit(f"{file} is missing; pass --text FILE..., any files of plain text")
        for line in file.read_bytes().splitlines():
            tokens = torch.tensor([*b"\n", *line.strip(), *b"\n"])
            for start in range(0, len(tokens) - 1 if line.strip() else 0, context):
                yield tokens[start : start + context + 1]


def pad(pieces: list[Tensor]) -> Batch:
    """Return inputs and targets of shape (pieces, longest piece)."""
    inputs = pad_sequence([piece[:-1] for piece in pieces], batch_first=True)
    targets = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=PAD)
    return inputs, targets


def real_tokens(batch: Batch) -> int:
    return int((batch[1] != PAD).sum())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        # Causal: the padding comes last, so no real token attends to it.
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        blocks = (Block(width, heads) for _ in range(layers))
        self.body = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of shape (pieces, 256, length), the order that cross_entropy expects."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.body(self.token(tokens) + self.position(positions)).transpose(1, 2)


@torch.no_grad()
def evaluate(stride: evenstride.Stride, net: nn.Module, loader: DataLoader) -> float:
    """Return the mean loss per token over the batches of all workers."""
    loss, tokens = 0.0, 0
    for x, y in loader:
        loss += F.cross_entropy(net(x), y, ignore_index=PAD, reduction="sum").item()
        tokens += real_tokens((x, y))
    return stride.mean(loss, tokens)


def main(args: argparse.Namespace) -> None:
    pieces = list(sequences(args.text, args.context))[: args.limit]
    held_out = max(1, len(pieces) // 10)
    dist.init_process_group()
    leader = dist.get_rank() == 0
    torch.manual_seed(0)
    net = GPT(args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    stride = evenstride.Stride(args.global_batch)
    split = {"collate_fn": pad, "max_micro_batch": args.max_micro_batch}
    loader = stride.loader(pieces[held_out:], weight_fn=real_tokens, **split)
    test_loader = stride.loader(pieces[:held_out], train=False, **split)
    model = stride.watch(DistributedDataParallel(net))

    for epoch in range(stride.epoch, args.epochs):
        step_loss = 0.0
        for x, y in loader:
            with stride.accumulate(model):  # a step may have several micro-batches
                loss = F.cross_entropy(model(x), y, ignore_index=PAD)
                scaled = stride.scale(loss)  # by the tokens of this micro-batch / of the step
                scaled.backward()
            step_loss += scaled.item()
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
                if stride.step % args.log_every == 0:
                    mean = stride.mean(step_loss, 1)  # of the workers: the step's loss per token
                    if leader:
                        print(f"step {stride.step}: loss {mean:.4f}", flush=True)
                step_loss = 0.0
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
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--max-micro-batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128, help="longest sequence, in bytes")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=int, help="use only the first sequences")
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    main(parser.parse_args())
