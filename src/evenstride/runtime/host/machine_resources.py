"""Resources and load of a worker, for policies that split the batch by them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import psutil
import torch

from evenstride.core.policy import Policy

_REPEATS = 5
# A timed product takes at least this long: a GPU needs some 20 microseconds to start one.
_LONG_ENOUGH_S = 0.002
_SMALLEST, _LARGEST = 256, 8192  # rows of the square matrices


def measured_flops_per_s(device: torch.device) -> float:
    """Return a device's speed of a matrix product in the dtype in use, in FLOP/s.

    Takes some 50 ms on a CPU, less on a GPU.
    """
    dtype = dtype_in_use(device)
    return fastest_flops_per_s(lambda size: _product_s(size, device, dtype))


def dtype_in_use(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: autocast's if enabled, else the default."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.get_default_dtype()


def fastest_flops_per_s(product_s: Callable[[int], float]) -> float:
    """Return the FLOP/s of the fastest of a few sufficiently large products.

    ``product_s`` multiplies two square matrices of the given size and returns the time in seconds.
    The matrices grow until a product takes 2 ms. The launch dominates the time of a small product,
    and is the same for all GPUs. The fastest product counts, because causes other than the device
    slow down the others.
    """
    size = _SMALLEST
    while min(product_s(size), product_s(size)) < _LONG_ENOUGH_S and size < _LARGEST:
        size *= 2
    return 2.0 * size**3 / min(product_s(size) for _ in range(_REPEATS))


def _product_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    _wait_for(device)
    started_s = time.perf_counter()
    torch.matmul(a, a)
    _wait_for(device)
    return time.perf_counter() - started_s


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def usable_cores() -> float:
    """Return the cores this process may use: the least of its affinity, threads and CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota = quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min(cores, float(torch.get_num_threads()), quota or cores)


def quota_cores(membership: Path, root: Path) -> float | None:
    """Return the quota of this process's control group (v1 or v2) in cores, if it has one."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
        for _, controllers, path in lines:
            inside = path.lstrip("/")
            if "cpu" in controllers.split(","):
                group = root / "cpu" / inside
                quota = int((group / "cpu.cfs_quota_us").read_text())
                period = int((group / "cpu.cfs_period_us").read_text())
                return quota / period if quota > 0 else None
            if not controllers and (root / inside / "cpu.max").exists():
                limit, period_text = (root / inside / "cpu.max").read_text().split()
                return None if limit == "max" else int(limit) / int(period_text)
    except (OSError, ValueError):
        return None
    return None


def comparable(resources: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the resources to compare workers by: cores if all workers report them, else all.

    Args:
        resources: Resources of each worker; only CPU workers report ``cores``.

    >>> comparable([{"cores": 4, "flops_per_s": 5e10}, {"cores": 2, "flops_per_s": 1e10}])
    [{'cores': 4}, {'cores': 2}]
    >>> comparable([{"flops_per_s": 5e12}, {"cores": 2, "flops_per_s": 1e10}])
    [{'flops_per_s': 5000000000000.0}, {'cores': 2, 'flops_per_s': 10000000000.0}]
    """
    if all("cores" in one for one in resources):
        return [{"cores": one["cores"]} for one in resources]
    return list(resources)


Loads = tuple[float, float]
"""Fractions of CPU time and of memory in use, from 0 to 1."""


def unknown_loads() -> Loads:
    """Return the loads that a rank reports if its policy does not use them."""
    return nan, nan


def machine_loads() -> Loads:
    """Return both loads; CPU load is averaged since the last call in this process."""
    cpu: float = psutil.cpu_percent(interval=None)
    memory: float = psutil.virtual_memory().percent
    return round(cpu / 100.0, 4), round(memory / 100.0, 4)


def loads_for(policy: Policy[Any]) -> Callable[[], Loads]:
    """Return the function that measures the loads for a policy; a call takes some 0.1 ms."""
    if getattr(policy, "predicts_from_loads", False):
        machine_loads()  # the first call returns no CPU load
        return machine_loads
    return unknown_loads
