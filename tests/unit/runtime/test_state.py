"""``state_dict`` holds exactly what model and optimizer have seen, or it says that it cannot."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from evenstride.errors import ConfigError, LoaderBusy, StepInFlight
from tests.messages import raises_message
from tests.order import epoch_order
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


def _position(state: dict[str, Any]) -> tuple[int, int, int]:
    return state["epoch"], state["position"], state["step"]


def test_it_follows_torchs_protocol_and_holds_plain_values(make_stride: MakeStride) -> None:
    stride = make_stride()
    file = io.BytesIO()

    torch.save({"stride": stride.state_dict()}, file)
    file.seek(0)

    assert isinstance(stride, Stateful)
    assert torch.load(file, weights_only=True) == {"stride": stride.state_dict()}


def test_a_step_is_part_of_it_once_the_optimizer_has_stepped(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(10)), Trainer(stride)

    states = []
    for batch in loader:
        before = stride.state_dict()
        trainer.backward(batch)
        with raises_message(StepInFlight):
            stride.state_dict()
        trainer.optimizer.step()
        states.append((_position(before), _position(stride.state_dict())))

    assert states == [
        ((0, 0, 0), (0, 4, 1)),
        ((0, 4, 1), (0, 8, 2)),
        ((0, 8, 2), (0, 10, 3)),
    ]
    assert _position(stride.state_dict()) == (1, 0, 3)


def test_between_micro_batches_it_is_refused(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(8), max_micro_batch=2), Trainer(stride)
    allowed = []

    for batch in loader:
        for moment in ("handed", "computed"):
            try:
                stride.state_dict()
                allowed.append((stride.step, moment))
            except StepInFlight:
                pass
            if moment == "handed":
                with stride.accumulate(trainer.model):
                    trainer.backward(batch)
        if stride.synced:
            trainer.update()

    assert allowed == [(0, "handed"), (1, "handed")]


def test_leaving_the_loop_before_the_optimizer_step_does_not_help(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(8)), Trainer(stride)
    for batch in loader:
        trainer.backward(batch)
        break

    with pytest.raises(StepInFlight):
        stride.state_dict()

    trainer.update()
    assert _position(stride.state_dict()) == (0, 4, 1)


def test_a_step_that_the_gradient_scaler_skips_is_over_when_the_scaler_is_updated(
    make_stride: MakeStride,
) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(8)), Trainer(stride)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = [p.detach().clone() for p in trainer.model.parameters()]

    for batch in loader:
        loss = trainer.loss(batch) * torch.inf
        scaler.scale(stride.scale(loss)).backward()  # type: ignore[no-untyped-call]
        scaler.step(trainer.optimizer)
        with pytest.raises(StepInFlight):
            stride.state_dict()
        scaler.update()
        assert stride.state_dict()["step"] == stride.step
        trainer.optimizer.zero_grad()
        assert stride.state_dict()["step"] == stride.step

    assert scaler.get_scale() == 2.0, "both steps were skipped"
    for before, after in zip(weights, trainer.model.parameters(), strict=True):
        assert torch.equal(before, after)
    assert _position(stride.state_dict()) == (1, 0, 2)


def test_it_does_not_matter_which_optimizer_steps(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(4)), Trainer(stride)
    elsewhere = nn.Linear(1, 1)
    adam = torch.optim.Adam(elsewhere.parameters())

    for batch in loader:
        stride.scale(trainer.loss(batch) + elsewhere(batch[1]).mean()).backward()  # type: ignore[no-untyped-call]
        adam.step()

    assert stride.state_dict()["step"] == 1


def test_a_new_stride_goes_on_where_the_old_one_was(make_stride: MakeStride) -> None:
    first = make_stride(seed=5)
    loader, trainer = first.loader(numbered(14)), Trainer(first)
    trained = trainer.epoch(loader) + trainer.epoch(loader, steps=2)
    state = first.state_dict()

    second = make_stride(seed=5)
    second.load_state_dict(state)
    loader, trainer = second.loader(numbered(14)), Trainer(second)
    assert (second.epoch, second.step) == (1, 6)
    trained += trainer.epoch(loader)

    orders = [epoch_order(5, epoch, 14, shuffle=True).tolist() for epoch in (0, 1)]
    assert [index for ids in trained for index in ids] == orders[0] + orders[1]
    assert _position(second.state_dict()) == (2, 0, 8)


def test_a_run_may_go_back_to_an_earlier_state(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(16)), Trainer(stride)
    trainer.epoch(loader, steps=1)
    state = stride.state_dict()
    once = trainer.epoch(loader)

    stride.load_state_dict(state)

    assert trainer.epoch(loader) == once
    assert _position(stride.state_dict()) == (1, 0, 4)


def test_a_state_is_not_loaded_inside_the_loop(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, state = stride.loader(numbered(8)), stride.state_dict()
    loop = iter(loader)
    next(loop)

    with raises_message(LoaderBusy):
        stride.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"seed": 1}, "seed 0"), ({"global_batch": 5}, "global_batch")],
)
def test_a_state_of_other_settings_is_refused(
    make_stride: MakeStride, change: dict[str, int], complaint: str
) -> None:
    state = make_stride().state_dict()
    stride = make_stride(**change)

    with raises_message(ConfigError, complaint):
        stride.load_state_dict(state)

    assert stride.state_dict()["seed"] == change.get("seed", 0)


def test_a_state_of_another_data_set_is_refused_when_its_loader_is_made(
    make_stride: MakeStride,
) -> None:
    first = make_stride()
    loader, trainer = first.loader(numbered(14)), Trainer(first)
    trainer.epoch(loader, steps=1)
    second = make_stride()
    second.load_state_dict(first.state_dict())

    with raises_message(ConfigError, "length 14", "15"):
        second.loader(numbered(15))

    assert len(second.loader(numbered(14))) == 4
