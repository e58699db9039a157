"""The device of the parts of `gpu.py` that need one card: CUDA, or the tests' virtual device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

_SLEEP_CYCLES = 50_000_000  # whose time is measured, to know the cycles of a millisecond


class Card:
    """A device whose streams can be kept busy for a given time.

    This class is for CUDA; ROCm has the same functions.

    Args:
        device: The device.
    """

    backends = "nccl"
    compiler = "inductor"  # backend of torch.compile

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.start()

    def start(self) -> None:
        """Make this the process's device, and measure how fast its clock runs."""
        torch.cuda.set_device(self.device)
        sleep: Any = torch.cuda._sleep
        sleep(_SLEEP_CYCLES)  # the clock rises
        begin = self.event()
        sleep(_SLEEP_CYCLES)
        end = self.event()
        self.synchronize()
        self._cycles_per_ms = _SLEEP_CYCLES / begin.elapsed_time(end)

    @property
    def name(self) -> str:
        """The device's name, as its vendor calls it."""
        return torch.cuda.get_device_name(self.device)

    def hold(self, ms: float) -> None:
        """Keep the current stream busy with a kernel of one thread for ``ms`` milliseconds."""
        sleep: Any = torch.cuda._sleep
        sleep(round(ms * self._cycles_per_ms))

    def event(self) -> torch.Event:
        """Return an event that the current stream of this thread passes."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def stream(self) -> Any:
        """Return a new stream."""
        return self.module.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work goes to a stream."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def synchronize(self) -> None:
        """Wait until all streams have done their work."""
        self.module.synchronize(self.device)

    def allocated_bytes(self, *, peak: bool = False) -> int:
        """Return the bytes of all tensors now, or the most since `forget_peak`."""
        module = self.module
        return int((module.max_memory_allocated if peak else module.memory_allocated)(self.device))

    def forget_peak(self) -> None:
        """Begin a new measurement of the peak, with an empty cache."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(self.device)

    def limit_memory(self, most_bytes: int | None) -> None:
        """Let tensors of this process take at most so many bytes; ``None`` for all there are."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            1.0 if most_bytes is None else most_bytes / total, self.device
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in bfloat16 where torch regards that as safe."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def graphed(self, net: nn.Module, x: Tensor) -> nn.Module:
        """Return a network that runs as a CUDA graph."""
        graph: Any = torch.cuda.make_graphed_callables
        graphed: nn.Module = graph(net, (x,))
        return graphed

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the work of the block as a graph, which is never replayed."""
        # Other threads of the process may use the device meanwhile.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield


class VirtualCard(Card):
    """The virtual device of ``tests/virtual_device``: it computes on the CPU, in virtual time.

    It has no graphs. Parts that need them run without them.
    """

    compiler = "aot_eager"
    name = "virtual"

    def start(self) -> None:
        """Install the device, whose kernels take 0.2 ms each."""
        from tests.virtual_device import device_module

        device_module.install()
        device_module.costs(op_us=200.0, launch_us=2.0)
        self.backends = device_module.BACKENDS
        self._hold: Callable[[float], None] = device_module.work
        self._limit = device_module.limit_memory
        self._captures = False
        self.module = torch.get_device_module(self.device)
        self.module.is_current_stream_capturing = lambda: self._captures

    def hold(self, ms: float) -> None:
        """Let the current stream work for ``ms`` milliseconds."""
        self._hold(ms)

    def limit_memory(self, most_bytes: int | None) -> None:
        """Let tensors of this process take at most so many bytes; ``None`` for all there are."""
        self._limit(2**62 if most_bytes is None else most_bytes)

    def graphed(self, net: nn.Module, x: Tensor) -> nn.Module:
        """Return the network as it is."""
        del x
        return net

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Say during the block that the stream is captured."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False


def card_of(device: str) -> Card:
    """Return the card of a device by name, such as ``cuda:0`` or ``virtual``."""
    if device == "virtual":
        from tests.virtual_device.device_module import DEVICE, install

        install()  # before torch is asked for the device's module
        return VirtualCard(DEVICE)
    return Card(torch.device(device))
