"""The weighting of one rank's losses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from evenstride.errors import ScaleError
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.weighing import Rank


@pytest.mark.parametrize(
    ("world_size", "samples", "window"),
    [(1, 4, 4), (3, 5, 12), (3, 1, 12), (8, 12, 12), (2, 6, 12)],
)
def test_a_loss_is_weighted_by_its_samples(world_size: int, samples: int, window: int) -> None:
    rank = Rank(world_size)
    rank.take(samples, window)

    assert rank.gradient() == pytest.approx(world_size * samples / window)


def test_a_loss_is_weighted_by_its_tokens() -> None:
    rank = Rank(world_size=3)
    rank.take(5, 12)

    assert rank.gradient(weight=2.5) == 3.0, "alone in the exchange, it is the whole sum"


def test_a_weight_of_the_loaders_goes_before_the_samples() -> None:
    rank = Rank(world_size=3)
    rank.take(5, 12, weight=40.0)
    rank.exchange.start(120.0)

    assert rank.gradient() == 1.0


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_a_ghost_adds_zeros_and_nothing_of_it_remains(value: float, watched: bool) -> None:
    rank = Rank(world_size=2)
    rank.step.watched.models += [rank.model] * watched
    rank.take(0, 12, share=0)
    assert rank.gradient(value=value) == 0.0

    rank.take(6, 12)

    assert rank.gradient() == 1.0


def test_the_tokens_of_a_ghost_do_not_count() -> None:
    rank = Rank(world_size=2)
    rank.take(0, 12, share=0)

    assert rank.gradient(weight=5.0) == 0.0
    assert rank.exchange.total() == 0.0


def test_tokens_that_are_all_padding_weigh_nothing_even_if_their_mean_is_no_number() -> None:
    rank = Rank(world_size=2)
    rank.take(6, 12, weight=0.0)
    rank.exchange.start(0.0)

    assert rank.gradient(value=float("nan")) == 0.0


def test_several_losses_of_a_batch_may_be_scaled_each() -> None:
    rank = Rank(world_size=2)
    batch = rank.take(9, 12)

    together = rank.scaling.scale(rank.loss(), None) + rank.scaling.scale(rank.loss(3.0), None)
    together.backward()  # type: ignore[no-untyped-call]

    assert rank.model.bias.grad is not None
    assert float(rank.model.bias.grad) == 6.0
    assert rank.committed == [batch]


def test_a_loss_may_be_scaled_in_a_checkpoint_that_runs_again_in_the_backward_pass() -> None:
    rank = Rank(world_size=2)
    batch = rank.take(9, 12)

    def scaled(inputs: torch.Tensor) -> torch.Tensor:
        return rank.scaling.scale(rank.model(inputs).square().sum(), None)

    with set_checkpoint_early_stop(False):  # so that the last line runs again, too
        checkpoint(scaled, torch.ones(1, 1), use_reentrant=False).backward()

    assert rank.committed == [batch]


def test_a_step_is_committed_once_and_at_its_last_micro_batch() -> None:
    rank = Rank()
    for first, last in [(True, False), (False, False), (False, True)]:
        batch = rank.take(2, 6, first=first, last=last)
        assert rank.batch.mid_step == (not first)
        rank.gradient()
        assert rank.batch.mid_step == (not last)
    rank.gradient()  # a second loss of the same batch

    assert rank.committed == [batch]
    assert not rank.batch.failed


def test_a_synchronisation_that_breaks_off_is_known_to_have_failed() -> None:
    def lose_the_connection() -> None:
        raise ConnectionError

    rank = Rank()
    rank.take(2, 2)
    # The engine's own wait for the others: queued after ours, and before what follows it.
    rank.model.bias.register_hook(  # type: ignore[no-untyped-call]
        lambda _: Variable._execution_engine.queue_callback(lose_the_connection)
    )

    with contextlib.suppress(ConnectionError):
        rank.gradient()

    assert rank.committed == []
    assert rank.batch.failed


@pytest.mark.parametrize(("world_size", "samples"), [(1, 12), (3, 5), (2, 0)])
def test_scaling_a_scaled_loss_is_refused(world_size: int, samples: int) -> None:
    rank = Rank(world_size)
    rank.take(samples, 12)
    scaled = rank.scaling.scale(rank.loss(), None)

    with raises_message(ScaleError, "step 7"):
        rank.scaling.scale(scaled, None)


def test_scaling_outside_the_loop_is_refused(make_stride: MakeStride) -> None:
    with raises_message(ScaleError):
        make_stride().scale(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    rank = Rank(2)
    rank.take(3, 12)

    with raises_message(ScaleError):
        rank.scaling.scale(rank.loss(), weight)


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (0.5, ("item()",)),
        (None, ("NoneType",)),
        (torch.ones(3, 2), ("loss.mean()",)),
        (torch.ones(0), ()),
    ],
)
def test_an_invalid_loss_is_refused_with_what_to_give(
    loss: Any, complaint: tuple[str, ...]
) -> None:
    rank = Rank(2)
    rank.take(3, 12)

    with raises_message(ScaleError, *complaint):
        rank.scaling.scale(loss, None)

    rank.gradient()  # nothing was changed
    assert len(rank.committed) == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_may_have_any_shape_of_one_element(shape: tuple[int, ...]) -> None:
    rank = Rank(2)
    rank.take(3, 12)

    scaled = rank.scaling.scale(torch.ones(shape, requires_grad=True), None)

    assert (scaled.shape, scaled.item()) == (shape, 0.5)


def test_a_loss_that_adds_up_is_multiplied_by_the_ranks_alone() -> None:
    rank = Rank(world_size=3)
    factors = []
    for samples in (5, 0):
        rank.take(samples, 12, share=samples)
        rank.model.zero_grad()
        rank.scaling.scale(rank.loss(), None, "sum").backward()  # type: ignore[no-untyped-call]
        assert rank.model.bias.grad is not None
        factors.append(float(rank.model.bias.grad))

    assert factors == [3.0, 0.0]


def test_a_loss_that_adds_up_needs_steps_in_common() -> None:
    rank = Rank(world_size=3)
    rank.take(5, 12, claimed=5)

    with raises_message(ScaleError):
        rank.scaling.scale(rank.loss(), None, "sum")
