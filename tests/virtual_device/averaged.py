"""Programs that train with DistributedDataParallel on virtual devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.multiproc.training import flat, net
from tests.virtual_device import device_module as virtual

FORWARD_MS = 10.0
_STEPS_TO_SETTLE = 2  # DDP rebuilds its buckets in the second step


class Working(nn.Module):
    """A layer that passes its input on, and works for known times."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.times = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return virtual.worked(x, *self.times)


def gradients(rank: int) -> tuple[list[float], list[float]]:
    """Return the averaged gradients of three steps, over Gloo on the CPU and on the device."""
    virtual.install()
    group = dist.new_group(backend=virtual.BACKENDS)
    on_cpu = DistributedDataParallel(net())
    on_device = DistributedDataParallel(net().to(virtual.DEVICE), process_group=group)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    both: tuple[list[float], list[float]] = [], []
    for batch in x:
        for model, seen in zip((on_cpu, on_device), both, strict=True):
            model.zero_grad()
            model(batch.to(next(model.parameters()).device)).square().mean().backward()
            seen += [float(one) for one in flat(model.module)]
    return both


def times(rank: int, backward_ms: list[float], latency_ms: float, buckets: int) -> list[float]:
    """Return how long a step takes, and how far the host is ahead, in milliseconds.

    The rank works for `FORWARD_MS`, then for its ``backward_ms``. Of two buckets, the first is
    complete before that work, and the second after it.
    """
    virtual.install()
    group = dist.new_group(backend=virtual.BACKENDS)
    first, last = nn.Linear(5, 300, bias=False), nn.Linear(300, 1, bias=False)
    layers = first, Working(FORWARD_MS, backward_ms[rank]), last
    # A bucket is full once it has more bytes than the cap; there are two parameters.
    cap_mb = 100.0 if buckets == 1 else 1e-4
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(virtual.DEVICE), process_group=group, bucket_cap_mb=cap_mb
    )
    x = torch.ones(2, 5).to(virtual.DEVICE)
    for step in range(_STEPS_TO_SETTLE + 1):
        if step == _STEPS_TO_SETTLE:
            torch.accelerator.synchronize()
            dist.barrier(group)
            virtual.link(latency_us=1000.0 * latency_ms)
        begun_ms = virtual.cursor_ms()
        model(x).sum().backward()
    return [virtual.cursor_ms() - begun_ms, virtual.cursor_ms() - virtual.host_ms()]


def autocast(rank: int, on_device: bool) -> tuple[list[str], list[float]]:
    """Return types and gradients of a step in bfloat16 on the device, or over Gloo on the CPU.

    The types are those of a linear layer's output, of a softmax of it, and of the gradients.
    """
    virtual.install()
    kind, backend = (virtual.TYPE, virtual.BACKENDS) if on_device else ("cpu", "gloo")
    module = net(torch.float32).to(kind)
    model = DistributedDataParallel(module, process_group=dist.new_group(backend=backend))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 5, generator=generator).to(kind)
    with torch.autocast(kind, dtype=torch.bfloat16):
        y = model(x)
        likely = y.softmax(0)
        loss = y.float().square().mean()
    loss.backward()
    types = [str(one.dtype) for one in (y, likely, *(p.grad for p in module.parameters()))]
    return types, flat(module)
