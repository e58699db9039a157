"""The workloads of `forecast.py`: images with a convolutional net, and text with a transformer."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstride.lab.demo.demo_script import DemoTask
from evenstride.lab.demo.fashion_mnist import read_images

SAMPLES = 12_000
_HELD_OUT = 1200
_LETTERS, _APART = 32, 16  # letters of a window, and between the starts of windows


def images(data: Path) -> DemoTask:
    """Return the first images of Fashion-MNIST and a net of three convolutions."""

    def part(name: str, most: int) -> TensorDataset:
        pixels, labels = read_images(data / "fashion-mnist", name)
        scaled = torch.from_numpy(pixels[:most].copy()).view(-1, 1, 28, 28).float() / 255
        normal = (scaled - 0.286) / 0.353  # mean and standard deviation of the data
        return _numbered(normal, torch.from_numpy(labels[:most].astype("int64")))

    return DemoTask("images", part("train", SAMPLES), part("test", _HELD_OUT), _picture_net)


def text(data: Path) -> DemoTask:
    """Return windows of Emma, and a transformer of one layer that predicts each next letter."""
    letters = gzip.decompress((data / "gutenberg" / "austen-emma.txt.gz").read_bytes())
    known = {letter: number for number, letter in enumerate(sorted(set(letters)))}
    several = (SAMPLES + _HELD_OUT) * _APART + _LETTERS + 1
    numbers = torch.tensor([known[letter] for letter in letters[:several]])
    windows = numbers.unfold(0, _LETTERS + 1, _APART)[: SAMPLES + _HELD_OUT]
    before, following = windows[:, :-1].clone(), windows[:, 1:].clone()
    return DemoTask(
        "text",
        _numbered(before[:SAMPLES], following[:SAMPLES]),
        _numbered(before[SAMPLES:], following[SAMPLES:]),
        lambda: Letters(len(known)),
    )


def held_out_loss(net: nn.Module, task: DemoTask, part: slice) -> tuple[float, int]:
    """Return the summed loss of some held-out samples, and the number of its terms."""
    _, x, y = (tensor[part] for tensor in task.test.tensors)
    with torch.no_grad():
        return float(F.cross_entropy(net(x), y, reduction="sum")), y.numel()


class Letters(nn.Module):
    """One layer of causal attention over letters; returns ``(windows, letters known, length)``."""

    def __init__(self, known: int, width: int = 160, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(known, width)
        self.place = nn.Parameter(0.02 * torch.randn(_LETTERS, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, known)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next letters of each window."""
        h = self.embedding(x) + self.place
        several = self.mixed(self.first(h)).reshape(*h.shape[:2], 3, self.heads, -1)
        asked, keys, values = several.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(asked, keys, values, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        h = h + self.narrow(F.gelu(self.wide(self.second(h))))
        scores: Tensor = self.head(h).transpose(1, 2)
        return scores


def _picture_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 3, padding=1), nn.GroupNorm(4, 48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(48, 96, 3, padding=1), nn.GroupNorm(4, 96), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(96, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3)),
        *(nn.Flatten(), nn.Linear(96 * 9, 10)),
    )


def _numbered(x: Tensor, y: Tensor) -> TensorDataset:
    return TensorDataset(torch.arange(len(x)), x, y)


WORKLOADS = {"images": images, "text": text}
OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "images": lambda net, times: torch.optim.Adam(net.parameters(), lr=5e-4 * times),
    "text": lambda net, times: torch.optim.SGD(net.parameters(), lr=0.1 * times, momentum=0.9),
}
"""Optimizers of a net, with a factor on the learning rate for a batch of 128."""
