"""Measuring on a CUDA device never blocks the program; for other devices see test_noise.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from evenstride.runtime.noise.noise_parts import OwnGradient, Reading
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import numbered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Raise an error for any operation inside that waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_micro_batches_are_measured_without_waiting(
    make_stride: MakeStride, no_waiting: None
) -> None:
    stride = make_stride(global_batch=8, noise_every=1)
    model = stride.watch(nn.Linear(1, 1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, x in stride.loader(numbered(80), max_micro_batch=2, pin_memory=True):
        with stride.accumulate(model):
            loss = model(x.cuda(non_blocking=True)).square().mean()
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    stride.close()

    noise = stride.summary().noise
    assert noise is not None
    assert noise.steps == 10


def test_a_ranks_own_gradient_is_measured_without_waiting(no_waiting: None) -> None:
    model = nn.Linear(64, 64).cuda()
    own = OwnGradient(lambda _: None)
    own.begin(list(model.parameters()))
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    own.piece_ended(1.0, last=True)
    found = own.end()
    assert found is not None
    reading = Reading(found.over_weight.reshape(1))
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    assert reading.there
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert reading.values() == pytest.approx([expected], rel=1e-9)
