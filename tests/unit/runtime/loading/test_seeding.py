"""A sample's randomness depends on seed, epoch and index, and on nothing else."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from evenstride.runtime.loading.seeding import (
    SeededDataset,
    item_seeds,
    needs_no_seed,
    seeded_dataset,
)
from tests.unit.runtime.conftest import MakeStride

any_seed = st.integers(-(2**63), 2**64)


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Samples that draw from all three of the usual generators."""

    classes = ("a", "b")

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


def _drawn(loader: DataLoader[Any]) -> dict[int, tuple[float, ...]]:
    """Return each sample's random numbers."""
    return {
        int(index): tuple(float(n) for n in noise)
        for ids, *columns in loader
        for index, *noise in zip(ids, *columns, strict=True)
    }


def _epochs(make_stride: MakeStride, count: int, **options: Any) -> list[dict[int, Any]]:
    stride = make_stride(global_batch=options.pop("global_batch", 4), seed=options.pop("seed", 0))
    loader = stride.loader(Noisy(), **options)
    weight = torch.ones((), requires_grad=True)
    epochs = []
    for _ in range(count):
        drawn: dict[int, Any] = {}
        for batch in loader:
            drawn |= _drawn([batch])  # type: ignore[arg-type]
            stride.scale(weight * 1.0).backward()  # type: ignore[no-untyped-call]
        epochs.append(drawn)
    return epochs


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork next to threads
def test_a_sample_is_the_same_in_any_batch_order_or_process(make_stride: MakeStride) -> None:
    usual = _epochs(make_stride, 2)

    assert _epochs(make_stride, 2, global_batch=5) == usual
    assert _epochs(make_stride, 2, shuffle=False) == usual
    assert _epochs(make_stride, 2, num_workers=2) == usual


def test_each_epoch_and_each_seed_draws_differently(make_stride: MakeStride) -> None:
    first, second = _epochs(make_stride, 2)
    (other,) = _epochs(make_stride, 1, seed=1)

    for column in range(3):
        numbers = [row[column] for drawn in (first, second, other) for row in drawn.values()]
        assert len(set(numbers)) == 36, "in every generator, for every sample"


def test_without_seeding_the_global_generators_are_used(make_stride: MakeStride) -> None:
    torch.manual_seed(1)
    first = _epochs(make_stride, 1, seeded=False)
    torch.manual_seed(2)
    second = _epochs(make_stride, 1, seeded=False)

    assert first != second


NUMBERS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch, normal": lambda: float(torch.randn(())),
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.standard_normal()),
    "random": random.random,
    "random, normal": lambda: random.gauss(0, 1),
}


# Generators make normal numbers two at a time and keep the second for the next call.
@pytest.mark.parametrize("name", NUMBERS)
def test_loading_leaves_the_training_process_its_own_random_numbers(name: str) -> None:
    def numbers(samples: SeededDataset | None) -> list[float]:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        drawn = []
        for index in range(4):
            drawn.append(NUMBERS[name]())
            if samples is not None:
                samples.__getitems__([(index, 99), (index + 1, 98)])
        return drawn

    assert numbers(SeededDataset(Noisy())) == numbers(None)


def test_the_generators_are_put_back_even_if_a_sample_fails() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise OSError(index)

    np.random.seed(2)
    expected = np.random.RandomState(2).rand()

    with pytest.raises(OSError, match="7"):
        SeededDataset(Broken()).__getitems__([(7, 1)])

    assert np.random.rand() == expected


@given(seed=any_seed, epoch=st.integers(0, 2**40), index=st.integers(0, 2**40))
def test_an_items_seed_does_not_depend_on_its_batch(seed: int, epoch: int, index: int) -> None:
    alone = item_seeds(seed, epoch, np.array([index]))
    together = item_seeds(seed, epoch, np.array([[index + 1, index], [3, index]]))

    assert together[0, 1] == together[1, 1] == alone[0]
    assert together[0, 0] != alone[0]
    assert item_seeds(seed, epoch + 1, np.array([index]))[0] != alone[0]
    assert item_seeds(seed + 1, epoch, np.array([index]))[0] != alone[0]


def test_item_seeds_are_those_of_every_version() -> None:
    assert item_seeds(0, 0, np.arange(3)).tolist() == [
        2558736989570252433,
        4764156602392020899,
        10603934637868093999,
    ]


def test_seeds_of_many_samples_and_epochs_never_meet() -> None:
    seeds = np.concatenate([item_seeds(0, epoch, np.arange(20_000)) for epoch in range(5)])

    assert len(np.unique(seeds)) == len(seeds)
    ones = np.unpackbits(seeds.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.002), "bits are even"


def test_data_sets_that_draw_nothing_are_left_as_they_are() -> None:
    plain = TensorDataset(torch.arange(4))

    class Own(TensorDataset):
        """Might draw random numbers."""

    assert needs_no_seed(ConcatDataset([plain, Subset(plain, [1])]))
    assert seeded_dataset(plain, seeded=True) is plain
    assert not needs_no_seed(Own(torch.arange(4)))
    assert not needs_no_seed(ConcatDataset([plain, Noisy()]))
    assert not needs_no_seed(Subset(Noisy(), [1]))
    assert isinstance(seeded_dataset(Noisy(), seeded=True), SeededDataset)
    assert isinstance(seeded_dataset(Noisy(), seeded=False), Noisy)


def test_a_seeded_data_set_is_otherwise_the_users_own() -> None:
    samples = SeededDataset(Noisy(5))

    assert len(samples) == 5
    assert samples.classes == ("a", "b")
    assert len(pickle.loads(pickle.dumps(samples))) == 5
    with pytest.raises(AttributeError, match="nonsense"):
        _ = samples.nonsense
