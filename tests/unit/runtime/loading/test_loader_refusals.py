"""Loaders that cannot be: each refusal says why, and leaves the `Stride` as it was."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset

from evenstride.errors import ConfigError, LoaderBusy
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


class Endless(Dataset[int]):
    """A data set that does not know how long it is."""

    def __getitem__(self, index: int) -> int:
        return index


REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "a generator": (iter([1, 2]), {}, ()),
    "no length": (Endless(), {}, ()),
    "no samples": (numbered(0), {}, ()),
    "fewer samples than a batch": (numbered(3), {"drop_last": True}, ("3 samples",)),
    "no micro-batch": (numbered(9), {"max_micro_batch": 0}, ("max_micro_batch is 0",)),
    "no number of micro-batches": (numbered(9), {"micro_batches": 0}, ("micro_batches is 0",)),
    "micro-batches by size and by number": (
        numbered(9),
        {"micro_batches": 2, "max_micro_batch": 3},
        ("micro_batches=2", "max_micro_batch=3"),
    ),
    "a batch size": (numbered(9), {"batch_size": 2}, ("batch_size",)),
    "a sampler": (numbered(9), {"sampler": [1]}, ()),
    "batches out of order": (numbered(9), {"in_order": False}, ()),
    "a batch for evaluation": (numbered(9), {"global_batch": 2}, ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_cannot_be_is_refused_and_another_still_made(
    make_stride: MakeStride, name: str
) -> None:
    dataset, options, complaint = REFUSED[name]
    stride = make_stride()

    with raises_message(ConfigError, *complaint):
        stride.loader(dataset, **options)

    assert len(stride.loader(numbered(9))) == 3


def test_a_second_training_loader_is_refused_while_the_first_is_there(
    make_stride: MakeStride,
) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(9))

    with raises_message(ConfigError):
        stride.loader(numbered(9))

    del loader
    assert len(stride.loader(numbered(12))) == 3


def test_between_epochs_another_loader_may_take_the_place_for_data_that_has_grown(
    make_stride: MakeStride,
) -> None:
    stride = make_stride()
    trainer, first = Trainer(stride), stride.loader(numbered(9))
    steps = len(first)

    trainer.epoch(first, steps=1)
    with raises_message(ConfigError):
        stride.loader(numbered(12))
    trainer.epoch(first)
    second = stride.loader(numbered(12))
    with raises_message(LoaderBusy):
        trainer.epoch(first)
    seen = trainer.epoch(second)

    assert steps == 3
    assert sorted(index for step in seen for index in step) == list(range(12))
    assert stride.epoch == 2
