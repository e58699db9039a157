"""Programs on one virtual device; each returns times in milliseconds, or bytes."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from evenstride.runtime.checkpoint.restore.saved_state import capture_random, restore_random
from evenstride.runtime.loading.streams import drawn
from evenstride.runtime.noise.noise_parts import Reading
from evenstride.runtime.timing.device_timer import untimed
from tests.virtual_device import device_module as virtual

DEVICE = virtual.DEVICE


def kernels(rank: int) -> list[float]:
    """Return the cursor after a sum of two tensors of 8 elements, at several costs."""
    del rank
    after = []
    every: list[dict[str, Any]] = [
        {"op_us": 3.0},
        {"element_ns": 100.0},
        {"op_us": 3.0, "speed": 0.25},
    ]
    for costs in every:
        virtual.install()
        x = torch.empty(8, device=DEVICE)
        virtual.costs(**costs)
        _ = x + x
        after.append(virtual.cursor_ms())
    return after


def ahead(rank: int, queue_depth: int) -> list[float]:
    """Return host and cursor after four launches, and the host after it waited."""
    del rank
    virtual.install()
    virtual.costs(launch_us=500.0, queue_depth=queue_depth)
    for _ in range(4):
        virtual.work(10.0)
    seen = [virtual.host_ms(), virtual.cursor_ms()]
    torch.accelerator.synchronize()
    return [*seen, virtual.host_ms()]


def overlapped(rank: int) -> dict[str, float]:
    """Return times of two streams of which the first waits for the second."""
    del rank
    virtual.install()
    side, main = virtual.Stream(), torch.accelerator.current_stream()
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    virtual.work(4.0)
    begin.record()
    with torch.virtual.stream(side):  # type: ignore[attr-defined]
        virtual.work(30.0)
        done = side.record_event()
        inside = virtual.cursor_ms()
    virtual.work(10.0)
    before = virtual.cursor_ms()
    main.wait_event(done)
    end.record()
    passed = float(end.query())
    end.synchronize()
    return {
        "side": inside,
        "main before": before,
        "main after": virtual.cursor_ms(),
        "passed before the wait": passed,
        "elapsed": begin.elapsed_time(end),
        "host": virtual.host_ms(),
    }


def read_too_early(rank: int) -> str:
    """Return the error of the time between events that the device has not passed."""
    del rank
    virtual.install()
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    virtual.work(1.0)
    end.record()
    try:
        begin.elapsed_time(end)
    except RuntimeError as error:
        return str(error)
    return ""


def copied(rank: int) -> dict[str, float]:
    """Return the host's time after copies and reads behind 5 ms of work each."""
    del rank
    virtual.install()
    x, seen = torch.ones(3, device=DEVICE), {}

    def behind_work(name: str, read: Any) -> None:
        virtual.work(5.0)
        before = virtual.host_ms()
        read()
        seen[name] = virtual.host_ms() - before

    behind_work("item", lambda: x.sum().item())
    behind_work("cpu", x.cpu)
    behind_work("to the device", lambda: torch.ones(3).to(DEVICE))
    behind_work("to the device later", lambda: torch.ones(3).to(DEVICE, non_blocking=True))
    return seen


def allocated(rank: int) -> dict[str, Any]:
    """Return what the allocator counts, with room for 1,000 bytes."""
    del rank
    virtual.install()
    memory: Any = torch.accelerator
    gc.collect()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()  # by earlier programs of this process
    virtual.limit_memory(before + 1_000)
    kept = torch.empty(100, dtype=torch.uint8, device=DEVICE)
    gone = torch.empty(700, dtype=torch.uint8, device=DEVICE)
    del gone
    torch.empty(5_000, dtype=torch.uint8, device=torch.device("privateuseone", 1))
    try:
        torch.empty(901, dtype=torch.uint8, device=DEVICE)
        error = ""
    except torch.OutOfMemoryError as full:
        error = str(full)
    free, total = torch.get_device_module(DEVICE).mem_get_info(DEVICE)
    return {
        "error": error.replace(f"{before + 100} of {total} in use", "100 of 1000 in use"),
        "now": memory.memory_allocated() - before,
        "peak": memory.max_memory_allocated() - before,
        "free and total": (free, total - before),
        "fits": len(torch.empty(900, dtype=torch.uint8, device=DEVICE)),
        "kept": len(kept),
    }


def trained(rank: int, kind: str) -> list[list[float]]:
    """Return the gradients and the weights of two steps on the CPU or on the device."""
    del rank
    virtual.install()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    x, y = torch.randn(4, 2, 6, 6).double(), torch.tensor([0, 1, 1, 0])
    net.double().to(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    numbers: list[Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x.to(kind)), y.to(kind))
        loss.backward()  # type: ignore[no-untyped-call]
        numbers += [p.grad.flatten().cpu() for p in net.parameters() if p.grad is not None]
        optimizer.step()
    numbers += [p.detach().flatten().cpu() for p in net.parameters()]
    return [list(map(float, one)) for one in numbers]


def backward(rank: int) -> list[float]:
    """Return the cursor after a forward and a backward pass, part of which is on a side stream."""
    del rank
    virtual.install()
    side, main = virtual.Stream(), torch.accelerator.current_stream()
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    side.wait_stream(main)
    with torch.virtual.stream(side):  # type: ignore[attr-defined]
        y = virtual.worked(x, 2.0, 30.0)
    main.wait_stream(side)
    virtual.work(7.0)
    forward = virtual.cursor_ms()
    (2.0 * y).sum().backward()  # type: ignore[no-untyped-call]
    with torch.virtual.stream(side):  # type: ignore[attr-defined]
        on_side = virtual.cursor_ms()
    assert x.grad is not None
    return [forward, on_side, virtual.cursor_ms(), *map(float, x.grad)]


def read_later(rank: int) -> tuple[list[Any], list[float]]:
    """Return whether a reading has arrived, and the host's time, before and after a wait."""
    del rank
    virtual.install()
    virtual.costs(op_us=1.0)
    assert not untimed(torch.device(DEVICE)), "it waits for the device once, as watch() does"
    virtual.install()
    numbers = torch.ones(2, device=DEVICE)
    virtual.work(5.0)
    reading = Reading(2 * numbers)
    seen = [reading.there, virtual.host_ms()]
    torch.accelerator.synchronize()
    return [*seen, reading.there, virtual.host_ms()], reading.values()


def random_numbers(rank: int) -> dict[str, bool]:
    """Return which numbers repeat: after a restored state, and where a function draws."""
    del rank
    virtual.install()
    device = torch.device(DEVICE)
    state = capture_random(device)
    first = torch.rand(3, device=device)
    restore_random(state, device)

    def draw(samples: int) -> Tensor:
        return torch.rand(samples, device=device)

    again = torch.rand(3, device=device)
    batch, following = drawn(draw, 3, 1), torch.rand(3, device=device)
    restore_random(state, device)
    torch.rand(3, device=device)
    return {
        "of the device": device.type in state,
        "restored": first.equal(again),
        "drawn": batch.equal(drawn(draw, 3, 1)),
        "drawn under another seed": batch.equal(drawn(draw, 3, 2)),
        "following": following.equal(torch.rand(3, device=device)),
    }
