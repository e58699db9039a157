"""The contract of the training loop: scale and backward for every batch, accumulate for parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from evenstride.errors import ScaleError, UsageError
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered
from tests.unit.runtime.weighing import Rank

Breach = Callable[[Trainer, Any], object]
BREACHES: dict[str, tuple[Breach, str]] = {
    "not scaled": (lambda t, b: t.loss(b).backward(), "step 0"),  # type: ignore[no-untyped-call]
    "no backward": (lambda t, b: t.stride.scale(t.loss(b)), "step 0"),
    "nothing at all": (lambda _, __: None, "step 0"),
}


@pytest.mark.parametrize("name", BREACHES)
@pytest.mark.parametrize("length", [4, 8], ids=["the last batch", "another batch"])
def test_a_batch_without_a_scaled_backward_pass_is_noticed_at_the_next(
    make_stride: MakeStride, name: str, length: int
) -> None:
    breach, complaint = BREACHES[name]
    stride = make_stride()
    trainer, loop = Trainer(stride), iter(stride.loader(numbered(length)))
    breach(trainer, next(loop))

    with raises_message(ScaleError, complaint):
        next(loop)

    assert stride.step == 0


@pytest.mark.parametrize("option", [{"max_micro_batch": 2}, {"weight_fn": lambda _: 1.0}])
def test_a_weight_with_micro_batches_or_a_weight_function_is_refused(
    make_stride: MakeStride, option: dict[str, Any]
) -> None:
    stride = make_stride()
    trainer, loop = Trainer(stride), iter(stride.loader(numbered(8), **option))
    batch = next(loop)

    with (
        raises_message(ScaleError, "weight_fn"),
        stride.accumulate(trainer.model),
    ):
        stride.scale(trainer.loss(batch), weight=2.0)


def test_micro_batches_outside_of_accumulate_are_refused(make_stride: MakeStride) -> None:
    stride = make_stride()
    trainer, loop = Trainer(stride), iter(stride.loader(numbered(8), max_micro_batch=2))
    batch = next(loop)

    with raises_message(ScaleError):
        stride.scale(trainer.loss(batch))


def test_accumulating_outside_the_loop_is_refused(make_stride: MakeStride) -> None:
    stride = make_stride()

    with raises_message(UsageError), stride.accumulate(nn.ReLU()):
        raise AssertionError("the body is not entered")


class Ddp(nn.Linear):
    """Holds back its synchronisation the way DDP does."""

    held = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.held = True
        yield
        self.held = False


@pytest.mark.parametrize("last", [False, True])
def test_synchronisation_is_held_back_until_the_last_micro_batch(last: bool) -> None:
    rank, engine = Rank(2), Ddp(1, 1)
    rank.take(2, 6, last=last)

    with rank.step.accumulation.accumulate(engine):
        assert engine.held == (not last)

    assert not engine.held


def test_a_model_that_cannot_hold_back_is_refused_unless_it_is_alone() -> None:
    for world_size in (1, 2):
        rank = Rank(world_size)
        rank.take(2, 6, last=False)
        expected = contextlib.nullcontext() if world_size == 1 else raises_message(UsageError)
        with expected, rank.step.accumulation.accumulate(rank.model):
            assert world_size == 1
