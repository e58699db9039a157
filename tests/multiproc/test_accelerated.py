"""What only a CUDA device can show; each behaviour is tested without one elsewhere.

Timing: tests/unit/runtime/timing/test_device_timer.py. Weighting and drift: test_exactness.py,
test_drift.py. Memory: tests/unit/runtime/memory/test_oom_retry.py, test_scarce.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import evenstride
from evenstride.core.time_model.observation import median
from evenstride.testing import RankPool
from tests.multiproc.accelerated import deep_net, measured, mixed
from tests.multiproc.exactness import alone
from tests.multiproc.training import Loop, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_steps_are_timed_as_a_profiler_sees_them() -> None:
    stride = evenstride.Stride(global_batch=64)
    model = deep_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    kernels_s: list[float] = []

    def train(x: Tensor) -> None:
        x = x.cuda(non_blocking=True).repeat(8192 // len(x), 1)
        stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def profiled(x: Tensor) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train(x)
            torch.cuda.synchronize()
        events = [e for e in profile.events() or [] if e.device_type.name == "CUDA"]
        begun = min(e.time_range.start for e in events)
        kernels_s.append((max(e.time_range.end for e in events) - begun) / 1e6)

    free = [r.busy_s for r in measured(stride, train)]
    stride = evenstride.Stride(global_batch=64)
    measured(stride, profiled)

    assert median(tuple(free)) == pytest.approx(median(tuple(kernels_s[4:])), rel=0.03)


def test_the_gradient_is_exact_over_a_cpu_and_a_cuda_device(ranks: RankPool) -> None:
    everywhere = ranks.run(mixed, 2, 30, "static:23,7")

    truth = alone(Loop(30, 180, "static:23,7", steps=6))
    for reported in everywhere:
        assert reported["checks"] == 2, "weights are compared where ranks are of several kinds"
        for actual, expected in zip(reported["gradients"], truth, strict=True):
            assert relative_error(actual, expected) <= 1e-9  # weights drift by last digits


def test_memory_that_ends_on_a_device_is_survived() -> None:
    stride = evenstride.Stride(global_batch=64)
    model = torch.nn.Linear(5, 1).cuda()
    stride.watch(model)
    held_bytes = torch.cuda.memory_allocated()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held_bytes + 2**29) / total_bytes)
    counted = []
    try:
        for _, x, _ in stride.loader(_rows()):
            with stride.guard(), stride.accumulate(model):
                wide = x.cuda().repeat(1, 4096).repeat(1, 1024)  # 80 MB for each sample
                loss = (model(x.cuda()) * wide.mean(1, keepdim=True)).square().mean()
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            counted.append(stride.samples)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        stride.close()

    assert 0 in counted, "memory ended"
    assert sum(counted) == 128
    assert max(counted) < 64


def _rows() -> torch.utils.data.TensorDataset:
    from tests.multiproc.training import rows

    return rows(128, torch.float32)
