"""How fast the ranks exchange numbers."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from evenstride.core.time_model.observation import median


def reduce_s(elements: int, repeats: int = 9) -> float:
    """Return the median time of an all-reduce of float32 numbers in seconds; collective."""
    numbers, times_s = torch.zeros(elements), list[float]()
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_reduce(numbers)
        times_s.append(time.perf_counter() - started_s)
    return median(tuple(times_s))
