"""The training loader as frameworks use one: counted, held on to, built again."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from evenstride.errors import ConfigError, LoaderBusy, UsageError
from evenstride.integrations.lightning import TrainerLoader
from tests.messages import check_message, raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


def test_the_next_epoch_begins_while_the_last_iterator_is_still_held(
    make_stride: MakeStride,
) -> None:
    stride = make_stride()
    inner = stride.loader(numbered(12))
    trainer, loader = Trainer(stride), TrainerLoader(stride, inner)
    held = []
    for epoch in range(3):
        held.append(iter(loader))
        for _ in range(len(loader)):  # and never asks for more
            trainer.step(next(held[-1]))
        assert stride.step == 3 * (epoch + 1)

    with pytest.raises(LoaderBusy):
        iter(inner)


def test_an_epoch_that_was_left_early_is_continued(make_stride: MakeStride) -> None:
    stride = make_stride()
    trainer, loader = Trainer(stride), TrainerLoader(stride, stride.loader(numbered(12)))
    held = iter(loader)
    trainer.step(next(held))

    rest = [trainer.step(batch) for batch in loader]

    assert len(rest) == 2
    assert (stride.epoch, stride.step) == (1, 3)


def test_it_saves_and_restores_the_position(make_stride: MakeStride) -> None:
    stride, other = make_stride(), make_stride()
    trainer, loader = Trainer(stride), TrainerLoader(stride, stride.loader(numbered(12)))
    held = iter(loader)
    trainer.step(next(held))
    again = TrainerLoader(other, other.loader(numbered(12)))
    again.load_state_dict(loader.state_dict())

    assert other.step == 1
    assert len(list(map(Trainer(other).step, again))) == 2


def test_micro_batches_are_refused_at_the_first(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = TrainerLoader(stride, stride.loader(numbered(12), max_micro_batch=2))

    with raises_message(ConfigError):
        next(iter(loader))


@pytest.mark.parametrize("seeded", [True, False])
def test_a_loader_that_was_built_again_is_refused(make_stride: MakeStride, seeded: bool) -> None:
    loader = make_stride().loader(numbered(12), seeded=seeded)
    rebuilt = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)

    with raises_message(UsageError):
        next(iter(rebuilt))


def test_an_evaluation_in_micro_batches_is_counted_to_its_end(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = TrainerLoader(stride, stride.loader(numbered(10), train=False, max_micro_batch=3))

    batches = list(zip(range(len(loader)), loader, strict=False))

    assert sum(len(batch[0]) for _, batch in batches) == 10


def test_an_evaluation_that_stops_at_the_number_of_steps_warns_once(
    make_stride: MakeStride, caplog: pytest.LogCaptureFixture
) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(10), train=False, max_micro_batch=3)

    for _ in range(2):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        batches.close()  # type: ignore[attr-defined]

    check_message(caplog.messages, "TrainerLoader(stride, loader)")
