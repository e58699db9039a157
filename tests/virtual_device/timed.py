"""Programs in which evenstride times training steps on virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import evenstride
from evenstride.runtime.timing.device_timer import DeviceTimer, StreamMarks, untimed
from tests.inside import session
from tests.multiproc.loops import KeptSteps
from tests.multiproc.training import rows
from tests.virtual_device import device_module as virtual
from tests.virtual_device.averaged import Working

STEPS = 24
WARM = 8  # steps until shares, buckets and kernels no longer change
HOST_MS = 100.0
_OTHER_MS = 70.0

Fault = Literal["", "wrong stream", "wait as work", "early mark"]


def start(rank: int, speeds: list[float] | None = None, queue_depth: int = 1024) -> Any:
    """Prepare this rank's device, and return a process group for it and the CPU."""
    virtual.install()
    untimed.cache_clear()  # for devices of other costs
    speed = 1.0 if speeds is None else speeds[rank]
    virtual.costs(op_us=1.0, launch_us=2.0, speed=speed, queue_depth=queue_depth)
    virtual.link(latency_us=10.0)
    return dist.new_group(backend=virtual.BACKENDS)


class Net(nn.Module):
    """Two layers and known work between them, of which some run again in the backward pass."""

    def __init__(self, how: str, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(5, 8), Working(forward_ms, backward_ms), nn.Linear(8, 1)]
        )
        self.unused = nn.Linear(3, 3) if how == "find_unused_parameters" else nn.Identity()
        self.register_buffer("seen", torch.zeros(1))
        self._again = {"checkpointed work": (0, 1), "all checkpointed": (0, 1, 2)}.get(how, ())

    def forward(self, x: Tensor) -> Any:
        """Run the layers."""
        x = x.detach().requires_grad_()
        for place, layer in enumerate(self.layers):
            again = place in self._again
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        return x


def assumed(rank: int, used: bool) -> tuple[set[str], bool, str]:
    """Make a `Stride` whose policy needs the speed of the device, and watch a model there.

    Returns:
        The devices that the ranks were taken for, whether the measurement of the speed waited for
        the device, and why the model was refused.
    """
    group = start(rank)
    virtual.costs(op_us=1e3)
    with patch.object(torch.get_device_module(virtual.DEVICE), "is_initialized", lambda: used):
        stride = evenstride.Stride(global_batch=8, policy="static", process_group=group)
    waited = 0.0 < virtual.cursor_ms() <= virtual.host_ms()
    refused = ""
    try:
        model = nn.Linear(1, 1).to(virtual.DEVICE)
        stride.watch(DistributedDataParallel(model, process_group=group))
    except evenstride.ConfigError as error:
        refused = str(error)
    devices = {peer.device for peer in session(stride).team.peers}
    stride.close()
    return devices, waited, refused


def timed(
    rank: int, how: str, forward_ms: list[float], backward_ms: list[float], fault: Fault = ""
) -> list[tuple[float, float]]:
    """Return busy and waiting time of each modelled step after the first, in milliseconds.

    The rank works for its ``forward_ms`` and ``backward_ms`` in each step.
    """
    with broken(fault), untraced() if "compiled" in how else nullcontext():
        group = start(rank, queue_depth=8 if how == "a short queue" else 1024)
        stride = evenstride.Stride(
            global_batch=8,
            policy="uniform",
            process_group=group,
            noise_every=2 if how == "noise" else None,
        )
        parts = 2 if how == "micro-batches" else 1
        times = forward_ms[rank] / parts, backward_ms[rank] / parts
        net: Any = Net(how, *times).to(virtual.DEVICE)
        if how == "compiled blocks inside DDP":
            compiled = [torch.compile(layer, backend="aot_eager") for layer in net.layers]
            net.layers = nn.ModuleList(compiled)  # type: ignore[arg-type]
        model: Any = DistributedDataParallel(
            torch.compile(net, backend="aot_eager") if how == "compiled inside DDP" else net,
            process_group=group,
            static_graph=how == "static_graph",
            find_unused_parameters=how == "find_unused_parameters",
            gradient_as_bucket_view=how == "gradient_as_bucket_view",
            bucket_cap_mb=1e-5 if how == "a bucket for each layer" else 25.0,
        )
        if how == "blocks compiled after DDP":
            for layer in net.layers:
                layer.compile(backend="aot_eager")
        if how == "compiled around DDP":
            model = torch.compile(model, backend="aot_eager")
        stride.watch(model)
        records = _train(rank, how, stride, model, 8 // len(forward_ms) // parts)
        return [(1e3 * r.busy_s, 1e3 * r.wait_s) for r in records if r.modelled and r.step > WARM]


def _train(
    rank: int, how: str, stride: evenstride.Stride, model: nn.Module, micro_batch: int
) -> KeptSteps:
    records = KeptSteps(session(stride).state.clock.timer.finished)
    session(stride).state.clock.timer.report_to(records)
    loader = stride.loader(rows(8 * STEPS, torch.float32), max_micro_batch=micro_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(virtual.TYPE, enabled=how == "a gradient scaler")
    copies = virtual.Stream()
    for _, x, _ in loader:
        if how == "a slow host" and rank == 1:
            virtual.host_works(HOST_MS)
        with _copying(copies) if how == "copies on a side stream" else nullcontext():
            x = x.to(virtual.DEVICE, non_blocking=True)
        with stride.accumulate(model):
            loss = model(x).square().mean()
            scaler.scale(stride.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if how == "a host that waits":
            loss.item()
        if not stride.synced:
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if how == "evaluation" and stride.step % 5 == 4:
            virtual.work(_OTHER_MS)
            stride.mean(1.0, 1)
    stride.close()
    return records


@contextmanager
def untraced() -> Any:
    """Let torch.compile leave the known work alone, which is no operator."""
    plain = torch.compiler.disable(virtual.worked)  # type: ignore[no-untyped-call]
    with patch.object(virtual, "worked", plain):
        yield


@contextmanager
def _copying(stream: torch.Stream) -> Any:
    """Load on a side stream, which takes 5 ms and runs during the work of the step before."""
    with torch.virtual.stream(stream):  # type: ignore[attr-defined]
        virtual.work(5.0)
        yield
    torch.accelerator.current_stream().wait_stream(stream)


@contextmanager
def broken(fault: Fault) -> Any:
    """Break one part of the timing, to see that the tests find it."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
            stack.enter_context(patch.object(owner, name, by))

        if fault == "wrong stream":
            record = StreamMarks.record

            def elsewhere(self: StreamMarks) -> Any:
                with torch.virtual.stream(virtual.Stream()):  # type: ignore[attr-defined]
                    return record(self)

            replace(StreamMarks, "record", elsewhere)
        if fault == "wait as work":
            synchronised = DeviceTimer.synchronised

            def as_work(self: DeviceTimer) -> None:
                self.gradients_ready()  # so that nothing is left for the wait
                synchronised(self)

            replace(DeviceTimer, "synchronised", as_work)
        if fault == "early mark":
            ready, scale = DeviceTimer.gradients_ready, evenstride.Stride.scale

            def early(self: evenstride.Stride, loss: Tensor) -> Tensor:
                timer = session(self).state.clock.timer
                assert isinstance(timer, DeviceTimer)
                ready(timer)
                return scale(self, loss)

            replace(evenstride.Stride, "scale", early)
            replace(DeviceTimer, "gradients_ready", lambda _: None)
        yield


def refused(rank: int, how: str) -> str:
    """Return the error of `watch` on a device without times, or on the device of one rank only."""
    group = start(rank)
    if how == "no times":
        virtual.costs(op_us=0.0)
    stride = evenstride.Stride(global_batch=8, process_group=group, engine="none")
    mixed = how == "mixed" and rank == 0
    try:
        stride.watch(nn.Linear(5, 1).to("cpu" if mixed else virtual.DEVICE))
    except evenstride.ConfigError as error:
        return str(error)
    finally:
        stride.close()
    return ""


def balanced(rank: int, speeds: list[float], batch: int, steps: int) -> list[int]:
    """Return this rank's batch in every step of an adaptive run.

    A sample costs 0.3 ms on a device of speed 1.
    """
    group = start(rank, speeds)
    stride = evenstride.Stride(global_batch=batch, process_group=group)
    model = DistributedDataParallel(nn.Linear(5, 1).to(virtual.DEVICE), process_group=group)
    stride.watch(model)
    sizes = []
    for _, x, _ in stride.loader(rows(batch * steps, torch.float32)):
        sizes.append(len(x) if stride.samples else 0)
        y = model(x.to(virtual.DEVICE, non_blocking=True))
        worked = virtual.worked(y, 0.1 * sizes[-1], 0.2 * sizes[-1])
        stride.scale(worked.square().mean()).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    stride.close()
    return sizes
