"""What of a sample counts when ranks compare it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstride.runtime.loading.loader_agreement import Likeness, alike


class Kind(Enum):
    """Kinds of samples."""

    A = 1
    B = 2


@dataclass
class Record:
    """A sample with fields."""

    x: torch.Tensor
    label: int


def same(one: Any, other: Any) -> bool:
    """Return whether two samples count as one."""
    return alike(Likeness(one).to_plain(), Likeness(other).to_plain())


NOISE = torch.randn(4, 3, 40, 40, generator=torch.Generator().manual_seed(0))
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 2),
    "a number and a truth": (1, True),
    "floats": (1.0, 1.001),
    "not a number": (float("nan"), 1.0),
    "texts": ("one", "other"),
    "bytes": (b"one", b"other"),
    "kinds": (Kind.A, Kind.B),
    "features": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])),
    "bfloat16": (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()),
    "token ids": (torch.arange(100), torch.arange(100).flip(0)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "pictures": (NOISE[0], NOISE[1]),
    "bytes of pictures": ((NOISE[0] * 60).byte(), (NOISE[1] * 60).byte()),
    "arrays": (np.arange(5), np.arange(5) + 1),
    "complex": (np.array([1 + 1j]), np.array([1 + 2j])),
    "a sparse picture": (torch.eye(90)[:1], torch.eye(90)[60:61]),
    "keys": ({"a": 1}, {"b": 1}),
    "values": ({"a": 1, "b": [2]}, {"a": 1, "b": [3]}),
    "fields": (Record(NOISE[0], 1), Record(NOISE[0], 2)),
    "files": (Path("/one/a.jpg"), Path("/one/b.jpg")),
    "lists of floats": ([1.0, 2.0], [1.0, 3.0]),
    "types": ([1], object()),
}
EQUAL: dict[str, tuple[Any, Any]] = {
    "the same picture": (NOISE[0], NOISE[0].clone()),
    "rounded otherwise": (NOISE[0], NOISE[0] * (1 + 1e-6)),
    "decoded otherwise": ((NOISE[0] * 40 + 120).byte(), (NOISE[0] * 40 + 120.5).byte()),
    "an order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "another folder": (Path("/one/a.jpg"), Path("/other/a.jpg")),
    "another folder as text": ("/one/a.jpg", "C:\\other\\a.jpg"),
    "another token": ("https://one/a.jpg?token=1", "https://two/a.jpg?token=2"),
    "objects": (object(), object()),
    "an empty tensor": (torch.zeros(0), torch.zeros(0)),
    "a view": (NOISE[0].transpose(0, 2), NOISE[0].transpose(0, 2).contiguous()),
    "sparse tensors": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    "tensors without data": (torch.zeros(3, device="meta"), torch.zeros(3, device="meta")),
    "both not a number": (float("nan"), float("nan")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_samples_differ(name: str) -> None:
    one, other = DIFFERENT[name]

    assert not same(one, other)
    assert same(one, one)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_samples_are_regarded_as_equal(name: str) -> None:
    assert same(*EQUAL[name])


def test_an_image_counts_by_its_pixels() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    red, blue = (image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))

    assert same(red, red.copy())
    assert not same(red, blue)


def test_a_list_within_itself_comes_to_an_end() -> None:
    endless: list[Any] = [1]
    endless.append(endless)

    assert same(endless, endless)
