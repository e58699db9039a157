"""The training loss of measured steps, in the trace of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstride.runtime.noise.noise_parts import StepLoss
from evenstride.trace.read import read_records
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.memory.test_oom_retry import Small
from tests.unit.runtime.noise.test_noise_meter import BATCH, Solo, by_number, weighed_loss
from tests.unit.runtime.solo import numbered


@pytest.fixture
def measured(make_stride: MakeStride, tmp_path: Path) -> Callable[..., Solo]:
    """Return a run that measures every step, and writes its trace."""

    def make(model: torch.nn.Module | None = None) -> Solo:
        return Solo(make_stride(global_batch=BATCH, noise_every=1, trace=tmp_path), model)

    return make


def _losses(trace: Path) -> dict[int, float | None]:
    records = (record for record in read_records(trace) if record["kind"] == "noise")
    return {record["step"]: record["loss"] for record in records}


def _loss(solo: Solo, step: int, *, weighed: bool = False) -> float:
    """Return the loss over all samples of a step, as computed by another process."""
    ids = torch.tensor([number for piece in solo.pieces[step] for number in piece])
    xs = numbered(BATCH * (len(solo.pieces) - 1))[ids][1]
    return weighed_loss(solo.model, ids, xs, weighed=weighed).item()


@pytest.mark.parametrize("weighed", [{}, {"weight_fn": by_number}], ids=["counted", "weighed"])
@pytest.mark.parametrize("fits", [99, 5], ids=["fits", "comes again"])
def test_the_loss_of_a_measured_step_is_that_of_all_its_samples(
    measured: Callable[..., Solo], tmp_path: Path, weighed: dict[str, Any], fits: int
) -> None:
    model = Small(fits)
    solo = measured(model).train(4, max_micro_batch=9, **weighed)
    solo.stride.close()
    model.fits = BATCH

    expected = [_loss(solo, step, weighed=bool(weighed)) for step in range(4)]
    assert _losses(tmp_path) == pytest.approx(dict(enumerate(expected)), rel=1e-9)


def test_a_loss_on_another_device_than_the_gradients_is_unknown() -> None:
    """It could not be read with them without waiting for its device."""
    here, elsewhere = StepLoss(torch.device("cpu")), StepLoss(torch.device("cpu"))
    for loss in (here, elsewhere):
        loss.add(torch.tensor(2.0, requires_grad=True))
        loss.piece_ended(3.0)
    elsewhere.add(torch.ones((), device="meta"))
    elsewhere.piece_ended(1.0)

    assert here.total is not None
    assert (here.total.item(), here.total.requires_grad, here.total.dtype) == (
        6.0,
        False,
        torch.float64,
    )
    assert elsewhere.total is None


def test_with_a_batch_without_a_loss_the_loss_of_the_step_is_unknown() -> None:
    step = StepLoss(torch.device("cpu"))
    step.add(torch.ones(1))
    step.piece_ended(0.0)
    assert step.total is None, "what came to nothing adds nothing"

    step.add(torch.ones(1))
    step.add(torch.ones(1, dtype=torch.bfloat16))
    step.piece_ended(4.0)
    assert float(step.total or 0) == 8.0, "several losses of a batch are added up"

    step.piece_ended(4.0)
    assert step.total is None


def test_later_changes_of_a_loss_do_not_count() -> None:
    step, loss = StepLoss(torch.device("cpu")), torch.tensor(3.0, dtype=torch.float64)
    step.add(loss)
    loss.zero_()
    step.piece_ended(1.0)

    assert float(step.total or 0) == 3.0


def test_an_infinite_loss_is_left_out_and_its_noise_is_kept(
    measured: Callable[..., Solo], tmp_path: Path
) -> None:
    solo = measured()
    solo.broken = lambda loss: loss + (float("inf") if len(solo.pieces) == 2 else 0.0)
    solo.train(3, max_micro_batch=4).stride.close()

    assert [loss is None for loss in _losses(tmp_path).values()] == [False, True, False]
