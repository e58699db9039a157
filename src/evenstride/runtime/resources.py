"""What a worker is made of, for policies that split by declared resources."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_REPEATS = 5


def measured_flops_per_s(device: torch.device | None = None, size: int = 384) -> float:
    """Return the speed of a matrix product in the default dtype, in FLOP/s.

    The fastest of a few products counts: what slows some of them down is not the device.

    Args:
        device: where to measure; ``None`` means the current accelerator, else the CPU.
        size: edge of the square matrices.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a = torch.ones(size, size, device=device, dtype=torch.get_default_dtype())
    a @ a  # the first product also initialises the libraries
    best_s = float("inf")
    for _ in range(_REPEATS):
        _wait_for(device)
        started_s = time.perf_counter()
        a @ a
        _wait_for(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2.0 * size**3 / best_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usable_cores() -> float:
    """Return the cores this process may use: its affinity, its threads, and its CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota = _quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min(cores, float(torch.get_num_threads()), quota or cores)


def _quota_cores(membership: Path, root: Path) -> float | None:
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
