"""Gradients are summed over the workers, whichever workers have used a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError, UsageError
from evenstride.integrations.torchft.live_gradients import LiveGradients, no_weights, sum_gradients
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.training_step import TrainingStep, WeightExchange
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer
from tests.messages import raises_message


def parameters(*gradients: list[float] | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        if gradient is not None:
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    return made


def summed(*workers: list[nn.Parameter]) -> None:
    """Add up the gradients of several workers in this process."""
    sent: list[list[Tensor]] = []
    copies = [[_copy(p) for p in mine] for mine in workers]
    for mine in copies:
        sum_gradients(mine, lambda some: sent.append([one.clone() for one in some]), counts=True)
    sums = [torch.stack(some).sum(0) for some in zip(*sent, strict=True)]

    def add_up(some: list[Tensor]) -> None:
        for one, total in zip(some, sums, strict=True):
            one.copy_(total)

    for mine in workers:
        sum_gradients(mine, add_up, counts=True)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(parameter.detach().clone())
    copied.grad = None if parameter.grad is None else parameter.grad.clone()
    return copied


def values(mine: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in mine]


def test_gradients_are_added_up_in_place() -> None:
    one, other = parameters([1.0, 2.0], [3.0, 4.0]), parameters([10.0, 20.0], [30.0, 40.0])
    kept = one[0].grad

    summed(one, other)

    assert values(one) == values(other) == [[11.0, 22.0], [33.0, 44.0]]
    assert one[0].grad is kept


def test_a_parameter_that_some_have_used_has_the_same_gradient_on_all() -> None:
    one, other = parameters([1.0, 2.0], None), parameters(None, None)

    summed(one, other)

    assert values(one) == [[1.0, 2.0], None]
    assert values(other) == [[1.0, 2.0], None]


def test_what_only_a_worker_without_samples_has_used_has_no_gradient() -> None:
    ghost = parameters([0.0, 0.0])

    sum_gradients(ghost, lambda _: None, counts=False)

    assert values(ghost) == [None]


def test_large_models_travel_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstride.integrations.torchft.live_gradients.BUCKET_BYTES", 32)
    some = parameters([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])
    sizes: list[int] = []

    sum_gradients(some, lambda flats: sizes.extend(len(flat) for flat in flats), counts=True)

    assert sizes == [2 * 2 + 2, 2 + 1]
    assert values(some) == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def training(asked: list[int]) -> tuple[TrainingStep, nn.Linear, list[Draw]]:
    trained: list[Draw] = []
    clock, watched = RankClock(StepTimer([])), WatchedModels()
    batch = BatchInHand(watched)
    live = LiveGradients(watched, batch, lambda flats: asked.append(len(flats)))
    made = TrainingStep(
        1,
        clock,
        watched,
        batch,
        MicroBatchLimits(),
        trained.append,
        WeightExchange(no_weights, clock),
        add_up=live.add_up,
    )
    model = nn.Linear(2, 1)
    made.watch(model)
    return made, model, trained


def test_the_loss_is_weighted_by_the_part_of_the_samples() -> None:
    made, model, _ = training([])
    made.begin(Draw(0, 12, 3, 3, True, True), None)

    loss = model(torch.ones(3, 2)).mean()

    assert made.scaling.scale(loss, None).item() == pytest.approx(loss.item() * 3 / 12)


def test_gradients_are_added_up_when_the_last_batch_of_the_step_has_been_passed() -> None:
    asked: list[int] = []
    made, model, trained = training(asked)
    for first, last in [(True, False), (False, True)]:
        made.begin(Draw(4, 12, 6, 3, first, last), None)
        made.scaling.scale(model(torch.ones(3, 2)).mean(), None).backward()  # type: ignore[no-untyped-call]
        assert bool(asked) == last

    assert [draw.step for draw in trained] == [4]


def test_a_second_backward_pass_in_a_step_is_refused() -> None:
    made, model, _ = training([])
    made.begin(Draw(4, 12, 6, 3, True, True), None)
    made.scaling.scale(model(torch.ones(3, 2)).mean(), None).backward()  # type: ignore[no-untyped-call]

    again = made.scaling.scale(model(torch.ones(3, 2)).mean(), None)
    with raises_message(UsageError, "step 4"):
        again.backward()  # type: ignore[no-untyped-call]


def test_weights_are_refused() -> None:
    made, model, _ = training([])
    made.begin(Draw(4, 12, 6, 3, True, True), None)

    with raises_message(ConfigError):
        made.scaling.scale(model(torch.ones(3, 2)).mean(), 2.0)
