"""The virtual device as torch sees it: ``torch.virtual``, its costs, and its process group.

`install` makes PrivateUse1 the device type ``virtual`` and cannot be undone. Call it only in
processes that exist for tests of the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import backend_registration

from tests.virtual_device.extension import load

TYPE = "virtual"
DEVICE = torch.device("privateuseone", 0)  # known to torch by this name before `install`, too
BACKENDS = "cpu:gloo,virtual:vccl"
MIXED = "cpu:mixed,virtual:mixed"  # ranks on the CPU and on devices meet in one backend
_NEVER = 2**62

Place = torch.device | int | str | None


class Stream(torch.Stream):
    """A stream of virtual time, with the arguments of `torch.cuda.Stream`."""

    def __new__(cls, device: Place = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Return a new stream of a device; ``kwargs`` name an existing one."""
        if not kwargs:
            kwargs = {"device": torch.device(TYPE, _index(device)), "priority": priority}
        return super().__new__(cls, **kwargs)


class Event(torch.Event):
    """An event of virtual time, with the arguments of `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        """Return a new event; ``blocking`` makes no difference."""
        del blocking
        return super().__new__(cls, TYPE, enable_timing=enable_timing)


class Work(torch.autograd.Function):
    """Passes a tensor on, with work of known length in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        """Work for ``forward_ms``."""
        ctx.backward_ms = backward_ms
        work(forward_ms, x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Work for ``backward_ms``."""
        work(ctx.backward_ms, grads[0].device)
        return grads[0], None, None


def install() -> None:
    """Register device, module and process group with torch, and set all times to zero."""
    _register()
    load().reset()
    for index in range(load().DEVICES):
        load().set_limit(index, _NEVER)
        costs(device=index)
    link()
    hang_if_lost(None)


@cache
def _register() -> None:
    load()
    backend_registration.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _module())  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("mixed", _vccl, extended_api=True, devices=["cpu", TYPE])
    dist.Backend.register_backend("vccl", _vccl, extended_api=True, devices=TYPE)
    # As without "mixed", which a program must name.
    dist.Backend.default_device_backend_map |= {"cpu": "gloo", TYPE: "vccl"}


def costs(
    *,
    op_us: float = 0.0,
    element_ns: float = 0.0,
    launch_us: float = 0.0,
    speed: float = 1.0,
    queue_depth: int = 1024,
    device: Place = None,
) -> None:
    """Set what a device's kernels cost.

    Args:
        op_us: device time of each kernel, in microseconds.
        element_ns: further device time for each element of the tensors that a kernel gets, in
            nanoseconds; torch gives most kernels their result tensor, too.
        launch_us: host time of each launch, in microseconds.
        speed: a device of speed 0.5 takes twice as long for all its work.
        queue_depth: launches by which the host may be ahead of the device.
        device: the device; the current one if ``None``.
    """
    load().costs(_index(device), 1e3 * op_us, element_ns, 1e3 * launch_us, speed, queue_depth)


def work(ms: float, device: Place = None) -> None:
    """Let the current stream work for ``ms`` milliseconds on a device of speed 1.

    A rank that computes on the CPU passes that as the device: its host works.
    """
    if isinstance(device, torch.device) and device.type == "cpu":
        host_works(ms)
    else:
        load().work(_index(device), 1e6 * ms)


def worked(x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
    """Return a tensor unchanged, with work in the forward and in the backward pass."""
    y: Tensor = Work.apply(x, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return y


def host_works(ms: float) -> None:
    """Let the program spend ``ms`` milliseconds without work for a device."""
    load().host_works(int(1e6 * ms))


def host_ms() -> float:
    """Return the time of the program's clock, in milliseconds."""
    return float(load().host()) / 1e6


def cursor_ms(device: Place = None) -> float:
    """Return when the current stream has done its work, in milliseconds."""
    return float(load().cursor(_index(device))) / 1e6


def launches(device: Place = None) -> int:
    """Return the number of launches on a device since `install`."""
    return int(load().launches(_index(device)))


def limit_memory(size_bytes: int, device: Place = None) -> None:
    """Let tensors of a device take at most ``size_bytes``."""
    load().set_limit(_index(device), size_bytes)


def link(*, latency_us: float = 0.0, byte_ns: float = 0.0) -> None:
    """Set what collectives cost, in all groups of this process; must be alike on all ranks.

    Args:
        latency_us: time of each collective, in microseconds.
        byte_ns: further time for each byte that a rank puts in, in nanoseconds.
    """
    load().link(1e3 * latency_us, byte_ns)


def hang_if_lost(after_s: float | None) -> None:
    """Let collectives that a lost rank does not join never end, as those of NCCL.

    The caller continues, and the process hangs in real time where its host needs a result.

    Args:
        after_s: Seconds of real time for which a collective waits for a rank. ``None`` waits for
            ever, and a collective whose peer has ended raises an error.
    """
    load().hang_if_lost(0 if after_s is None else int(1e3 * after_s))


def _vccl(opts: Any, backend_options: Any) -> Any:
    del backend_options
    store = distributed_c10d.PrefixStore("vccl", opts.store)
    gloo = dist.ProcessGroupGloo(store, opts.group_rank, opts.group_size, opts.timeout)
    return load().Group(gloo, opts.group_rank, opts.group_size)


def _index(device: Place) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return torch.accelerator.current_device_index() if device is None else device


@contextmanager
def _using(index: int) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@contextmanager
def _on(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _stream(device: Place = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(TYPE, _index(device)))


def _rng_state(device: Place = None) -> Tensor:
    del device
    return torch.get_rng_state()  # kernels run on the CPU


def _set_rng_state(state: Tensor, device: Place = None) -> None:
    del device
    torch.set_rng_state(state)


def _memory() -> dict[str, Any]:
    accelerator: Any = torch.accelerator

    def free_and_total(device: Place = None) -> tuple[int, int]:
        total = load().limit(_index(device))
        return total - accelerator.memory_allocated(_index(device)), total

    return {
        "empty_cache": accelerator.empty_cache,
        "mem_get_info": free_and_total,
        **{
            name: _of_index(getattr(accelerator, name))
            for name in (
                "max_memory_allocated",
                "max_memory_reserved",
                "memory_allocated",
                "memory_reserved",
                "memory_stats",
                "reset_peak_memory_stats",
            )
        },
    }


def _of_index(function: Any) -> Any:
    return lambda device=None: function(_index(device))


def _module() -> ModuleType:
    module = ModuleType(f"torch.{TYPE}")
    module.__dict__.update(
        Stream=Stream,
        Event=Event,
        current_device=torch.accelerator.current_device_index,
        current_stream=_stream,
        default_stream=lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=20
        ),
        device=lambda device: _using(_index(device)),
        device_count=lambda: load().DEVICES,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=_rng_state,
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        manual_seed=lambda _: None,  # torch.manual_seed has seeded the CPU
        manual_seed_all=lambda _: None,
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        set_rng_state=_set_rng_state,
        set_stream=torch.accelerator.set_stream,
        stream=_on,
        synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
        _is_in_bad_fork=lambda: False,
        **_memory(),
    )
    sys.modules[module.__name__] = module
    return module
