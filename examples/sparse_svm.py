"""A linear SVM on sparse text features: which author wrote a passage?

    torchrun --nproc-per-node 2 examples/sparse_svm.py --texts DIR

DIR holds .txt.gz files of books. A file belongs to the class if its name begins with --author.
LB-BSP (Chen et al., SoCC 2020) trains such an SVM on malicious URLs. These passages of books stand
in for that data set, which is not included: each has a few dozen of 65,536 features.

A batch is a bag of features per passage, so the passages of a mini-batch have unequal lengths. The
loss of each step is the exact mean over all passages of the global batch, for any split.
"""

import argparse
import gzip
import os
import re
import zlib
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import evenstride

DEFAULT = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "gutenberg")
FEATURES = 2**16
Sample = tuple[Tensor, float]


def bag(words: list[str]) -> Tensor:
    """Return the hashed words and pairs of words, each once."""
    parts = {*words, *map(" ".join, pairwise(words))}
    # Not `hash`, which differs between processes.
    return torch.tensor(sorted({zlib.crc32(part.encode()) % FEATURES for part in parts}))


def passages(folder: Path, author: str, words: int) -> list[Sample]:
    """Return the features and the class, 1 or -1, of successive passages of all books."""
    books = sorted(folder.glob("*.txt.gz"))
    if not books:
        raise SystemExit(f"{folder} has no .txt.gz files; pass --texts DIR with some books")
    found = []
    for book in books:
        text = re.findall("[a-z]+", gzip.decompress(book.read_bytes()).decode("latin-1").lower())
        label = 1.0 if book.name.startswith(author) else -1.0
        found += [(bag(text[i : i + words]), label) for i in range(0, len(text), words)]
    return found


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all features in one tensor, where each passage begins in it, and the classes."""
    lengths = torch.tensor([0, *(len(features) for features, _ in samples[:-1])])
    labels = torch.tensor([label for _, label in samples])
    return torch.cat([features for features, _ in samples]), lengths.cumsum(0), labels


def hinge(scores: Tensor, labels: Tensor) -> Tensor:
    return (1.0 - labels * scores.squeeze(1)).clamp(min=0.0)


def main(args: argparse.Namespace) -> None:
    samples = passages(args.texts, args.author, args.words)
    test = samples[::10]
    train = [sample for index, sample in enumerate(samples) if index % 10]
    dist.init_process_group()
    net = nn.EmbeddingBag(FEATURES, 1, mode="mean")
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, weight_decay=args.decay)

    stride = evenstride.Stride(args.global_batch)
    loader = stride.loader(train, collate_fn=collate)
    test_loader = stride.loader(test, train=False, collate_fn=collate)
    model = stride.watch(DistributedDataParallel(net))

    for epoch in range(stride.epoch, args.epochs):
        for features, begins, labels in loader:
            stride.scale(hinge(model(features, begins), labels).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        loss, right, count = 0.0, 0, 0
        with torch.no_grad():
            for features, begins, labels in test_loader:
                scores = net(features, begins)
                loss += hinge(scores, labels).sum().item()
                right += int((scores.squeeze(1) * labels > 0).sum())
                count += len(labels)
        tested = stride.mean(loss, count), stride.mean(right, count)
        if dist.get_rank() == 0:
            print("epoch {}: test loss {:.4f}, accuracy {:.2%}".format(epoch, *tested), flush=True)
    if dist.get_rank() == 0:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path, default=DEFAULT, help="folder of .txt.gz books")
    parser.add_argument("--author", default="austen", help="names of this class's files begin so")
    parser.add_argument("--words", type=int, default=20, help="per passage")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=100.0)
    parser.add_argument("--decay", type=float, default=1e-6, help="weight of the squared norm")
    main(parser.parse_args())
