"""What the ranks of `gpu.py` train, and how: nets, images, arms, marks and a rival for the card."""

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
POOL = 1_024  # different images; an epoch goes through them many times
EPOCH_STEPS = 64
_GROUPS = 8  # of channels that are normalised together
_WARM_STEPS = 1  # at the start of a block, for the caches that other arms have emptied


class Residual(nn.Module):
    """Two convolutions beside a shortcut.

    Normalised by groups of channels: batch norm would depend on how a batch is split.
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
    """A net by name and width; the same weights wherever it is made."""

    name: str
    width: int

    def made(self) -> nn.Module:
        """Return a new one, on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return NETS[self.name](self.width)


class Images(Dataset[Any]):
    """Random images on the device, fetched a batch at a time.

    Args:
        batch: global batch to train them with; an epoch is a multiple of it.
        device: to keep them on.
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
    """One of lab's arms, with a net to choose, that warms up before each block.

    Args:
        place: of this rank.
        net: to train.
        data: with the global batch.
        policy: of the `Stride` that splits it; ``None`` for plain PyTorch.
        trace: where the leader records it.
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
        # Comparing weights now and then is no part of a step.
        super().__init__(place, data, policy, trace, net=net.made(), drift_check=0)

    def block(self, steps: int) -> float:
        """Train some steps, all ranks starting together; return the mean time of one."""
        for _ in range(_WARM_STEPS):
            self.step()
        return super().block(steps)

    def backward(self) -> None:
        """Fetch, forward and backward pass of a step."""
        self.steps += 1
        super().backward()


class Bench:
    """Trains a net of its own, alone, on batches of any size.

    Args:
        place: of this rank.
        net: to train.
    """

    def __init__(self, place: BenchRank, net: Net) -> None:
        self._place = place
        self._net = net.made().to(place.device)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)
        self._images = Images(1, place.device)

    def samples_per_s(self, step_s: float, most: int) -> float:
        """Return the speed at a batch that takes a good part of ``step_s``; all ranks measure."""
        self._place.start_s()
        size = 4
        while True:
            # The first few steps of a size allocate, and on a card choose their algorithms.
            times_s = [self._step_s(size) for _ in range(4)][2:]
            if min(times_s) >= step_s / 3 or 2 * size > most:
                return size / min(times_s)
            size *= 2

    def curve(self, sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
        """Return each size with its mean step time; all ranks measure at the same time.

        Every rank measures as many sizes, some of which may be alike.
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
        """Return the median time of averaging the gradients' bytes; collective."""
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
    """Return a point in the device's stream of work; on a CPU, the clock's reading."""
    if place.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(place.device))
    return event


def between_s(first: Any, second: Any) -> float:
    """Return the seconds between two points that the device has passed."""
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3


def steady() -> None:
    """Set what makes times mean something in processes started from now on, and whose they are."""
    os.environ["GPU_BENCHMARK_PID"] = str(os.getpid())
    # Without these glibc hands large blocks back to the kernel at every step, unevenly.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
    for name in ("TRACE", "POLICY", "MAX_STEPS", "CALIBRATE"):
        os.environ.pop(f"EVENSTRIDE_{name}", None)


def take(rank: int, devices: Sequence[str], cores: Sequence[Sequence[int]]) -> BenchRank:
    """Bind this process to its cores and device; return its place. Collective.

    Args:
        rank: of this process.
        devices: of all ranks, such as ``cuda:0``.
        cores: of all ranks.
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
    """Bind all threads of this process to some cores, and compute with as many threads."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))


@contextlib.contextmanager
def rival(device: torch.device) -> Iterator[None]:
    """Keep the device busy with matrix products beside the training, on a stream of their own.

    In the same process, so that they compete with this worker alone where the device's time is
    shared out among processes.
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
        if len(queued) > 2:  # the card never runs dry, and little is left when this ends
            queued.pop(0).synchronize()
    stream.synchronize()


def _as_it_is(batch: Any) -> Any:
    return batch
