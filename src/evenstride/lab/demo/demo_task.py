"""What the demo trains: handwritten digits, or Fashion-MNIST, and a small convolutional net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenstride.lab.demo.fashion_mnist import check_data, read_images

LEARNING_RATE = 0.02
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class DemoTask:
    """What is learned: a data set, and how to make the net for it."""

    name: str  # for people
    train: TensorDataset  # (sample id, input, label) per sample
    test: TensorDataset  # the same, held out
    # Makes one, always the same; what it returns goes into a cross-entropy.
    net: Callable[[], nn.Module]


def load_task(folder: Path | None) -> DemoTask:
    """Return scikit-learn's digits, or Fashion-MNIST from its four files in ``folder``.

    Raises:
        ConfigError: scikit-learn is not installed, or a file is missing or is something else.
    """
    check_data(folder)
    if folder is None:
        return _digits()
    train, test = (_fashion(folder, part) for part in ("train", "test"))
    return DemoTask("Fashion-MNIST", _numbered(*train), _numbered(*test), partial(small_net, 4))


def _digits() -> DemoTask:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8.0 - 1.0
    classes = torch.tensor(labels)
    held_out = torch.arange(len(classes)) % 6 == 5
    train = _numbered(pixels[~held_out], classes[~held_out])
    test = _numbered(pixels[held_out], classes[held_out])
    return DemoTask("digits", train, test, partial(small_net, 1))


def _fashion(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images, labels = read_images(folder, part)
    pixels = torch.from_numpy(images.astype(np.float32)).unsqueeze(1) / 127.5 - 1.0
    return pixels, torch.from_numpy(labels.astype(np.int64))


def _numbered(images: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(torch.arange(len(labels)), images, labels)


def small_net(stride: int, seed: int = 0, width: int = 128) -> nn.Module:
    """Return a net of three convolutions, the same for the same seed.

    Group norm rather than batch norm: it does not mix samples, so that unequal batches change
    nothing. Wide for such small images, so that a step is long against a limit's period.

    Args:
        stride: of the first layer, so that larger images cost no more.
        seed: of its parameters.
        width: of its last layers, in channels.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, width // 2, 3, stride=stride, padding=1),
        nn.GroupNorm(4, width // 2),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    torch.set_rng_state(generator_state)
    return net
