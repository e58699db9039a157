"""Training in the ranks of `gpu.py`: nets, images, arms, marks and a rival for the card."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenstride.lab.doctor import bench_run
from evenstride.lab.doctor.bench_ranks import BenchRank
from evenstride.runtime.engines.device_support import read_device
from evenstride.runtime.launching.die_with_parent import die_with_parent

SIDE, CLASSES = 32, 10
POOL = 1_024  # different images; an epoch uses each many times
EPOCH_STEPS = 64
_GROUPS = 8  # groups of channels that are normalised together
_WARM_STEPS = 1  # at the start of a block, because other arms have evicted the caches


class Residual(nn.Module):
    """Two convolutions with a shortcut.

    It uses group norm, because batch norm would depend on the split.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(_GROUPS, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(_GROUPS, outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet(width: int) -> nn.Module:
    """Return a residual net of 14 layers for images of 32 x 32 (He et al. 2015, section 4.2)."""
    stages = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(Residual(a * width, b * width, stride) for a, b, stride in stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def cnn(width: int) -> nn.Module:
    """Return three convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, CLASSES),
    )


NETS: dict[str, Callable[[int], nn.Module]] = {"resnet": resnet, "cnn": cnn}


@dataclass(frozen=True, slots=True)
class Net:
    """A net by name and width. Its initial weights are the same everywhere."""

    name: str
    width: int

    def made(self) -> nn.Module:
        """Return a new net on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return NETS[self.name](self.width)


class Images(Dataset[Any]):
    """Random images on a device, fetched in batches.

    Args:
        batch: Global batch. An epoch is a multiple of it.
        device: Device that holds the images.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        self.batch, self._length = batch, EPOCH_STEPS * batch
        self._x = torch.randn(POOL, 3, SIDE, SIDE, generator=generator).to(device)
        self._y = torch.randint(CLASSES, (POOL,), generator=generator).to(device)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index % POOL], self._y[index % POOL]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(np.asarray(indices) % POOL).to(self._x.device)
        return self._x[chosen], self._y[chosen]


class Arm(bench_run.BenchArm):
    """An arm of the lab with a given net, which warms up before each block.

    Args:
        place: Place of this rank.
        net: Net to train.
        data: Images and global batch.
        policy: Policy of the `Stride`, or ``None`` for plain PyTorch.
        trace: Trace file of the leader.
    """

    def __init__(
        self,
        place: BenchRank,
        net: Net,
        data: Images,
        policy: str | None,
        trace: Path | None = None,
    ) -> None:
        self.steps = 0
        # Comparing weights is not part of a step.
        super().__init__(place, data, policy, trace, net=net.made(), drift_check=0)

    def block(self, steps: int) -> float:
        """Train some steps, with all ranks starting together. Return the mean step time."""
        for _ in range(_WARM_STEPS):
            self.step()
        return super().block(steps)

    def backward(self) -> None:
        """Run fetch, forward and backward pass of a step."""
        self.steps += 1
        super().backward()


class Bench:
    """Trains a separate net without other ranks, on batches of any size.

    Args:
        place: Place of this rank.
        net: Net to train.
    """

    def __init__(self, place: BenchRank, net: Net) -> None:
        self._place = place
        self._net = net.made().to(place.device)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)
        self._images = Images(1, place.device)

    def samples_per_s(self, step_s: float, most: int) -> float:
        """Return the speed at a batch that takes at least a third of ``step_s``.

        All ranks measure at the same time.
        """
        self._place.start_s()
        size = 4
        while True:
            # The first few steps of a size allocate memory and, on a card, choose algorithms.
            times_s = [self._step_s(size) for _ in range(4)][2:]
            if min(times_s) >= step_s / 3 or 2 * size > most:
                return size / min(times_s)
            size *= 2

    def curve(self, sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
        """Return each size with its mean step time. All ranks measure at the same time.

        Every rank must give the same number of sizes. Sizes may be equal.
        """
        curve = []
        for size in sizes:
            self._step_s(size)
            times_s, started_s = list[float](), self._place.start_s()
            while len(times_s) < 3 or time.perf_counter() < started_s + seconds:
                times_s.append(self._step_s(size))
            curve.append((size, float(np.mean(times_s))))
        return curve

    def communication_s(self, repeats: int = 15) -> float:
        """Return the median time of an all-reduce of the gradients. A collective call."""
        elements = sum(p.numel() for p in self._net.parameters())
        numbers, times_s = torch.zeros(elements, device=self._place.device), list[float]()
        for _ in range(repeats):
            started_s = self._place.start_s()
            dist.all_reduce(numbers, group=self._place.group)
            times_s.append(self._place.now_s() - started_s)
        return float(np.median(times_s))

    def _step_s(self, size: int) -> float:
        started_s = self._place.now_s()
        x, y = self._images.__getitems__(range(size))
        F.cross_entropy(self._net(x), y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._place.now_s() - started_s


def mark(place: BenchRank) -> Any:
    """Return an event in the current stream of the device, or the time on a CPU."""
    if place.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(place.device))
    return event


def between_s(first: Any, second: Any) -> float:
    """Return the seconds between two marks that the device has passed."""
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3


def steady() -> None:
    """Set environment variables that make times in new processes reproducible."""
    os.environ["GPU_BENCHMARK_PID"] = str(os.getpid())
    # Without these, glibc returns large blocks to the kernel at irregular steps.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
    for name in ("TRACE", "POLICY", "MAX_STEPS", "CALIBRATE"):
        os.environ.pop(f"EVENSTRIDE_{name}", None)


def take(rank: int, devices: Sequence[str], cores: Sequence[Sequence[int]]) -> BenchRank:
    """Bind this process to its cores and device. Return its place. A collective call.

    Args:
        rank: Rank of this process.
        devices: Devices of all ranks, such as ``cuda:0``.
        cores: Cores of all ranks.
    """
    die_with_parent()
    bind(cores[rank])
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()  # of an earlier launch in this process
    facts: list[Any] = [None] * len(devices)
    dist.all_gather_object(facts, read_device(device))
    alone = len(devices) == 1
    group = None if alone else dist.group.WORLD
    return BenchRank(rank, device, tuple(facts), group, "" if alone else "gloo")


def bind(cores: Sequence[int]) -> None:
    """Bind all threads of this process to some cores, and use one torch thread per core."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))


@contextlib.contextmanager
def rival(device: torch.device) -> Iterator[None]:
    """Keep the device busy with matrix products on a separate stream during training.

    They run in the same process, so that they compete with this worker only, if the device
    time-slices between processes.
    """
    stop = threading.Event()
    work = threading.Thread(target=_multiply, args=(device, stop), daemon=True)
    work.start()
    try:
        yield
    finally:
        stop.set()
        work.join()


def _multiply(device: torch.device, stop: threading.Event) -> None:
    cuda = device.type == "cuda"
    numbers = torch.randn((4096, 4096) if cuda else (384, 384), device=device)
    product = torch.empty_like(numbers)
    if not cuda:
        while not stop.is_set():
            torch.mm(numbers, numbers, out=product)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    queued = list[torch.cuda.Event]()
    while not stop.is_set():
        with torch.cuda.stream(stream):
            torch.mm(numbers, numbers, out=product)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        queued.append(event)
        if len(queued) > 2:  # keeps the card busy, with little left to do at the end
            queued.pop(0).synchronize()
    stream.synchronize()


def _as_it_is(batch: Any) -> Any:
    return batch
