"""What a machine and a process group can do, measured."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride._version import __version__
from evenstride.core.weighting import loss_factor
from evenstride.lab.limits import open_limits
from evenstride.lab.links import reduce_s
from evenstride.runtime.peers import myself
from evenstride.runtime.resources import measured_flops_per_s, usable_cores
from evenstride.runtime.teardown import take_down_group

Findings = dict[str, Any]

_SMALL, _LARGE = 2, 2**20  # elements of float32, for latency and bandwidth
# A rank this much slower than the fastest is worth naming.
_SLOW = 0.8


def examine_machine() -> Findings:
    """Return what this process can say about its machine."""
    limits, caveat = open_limits(1)
    limits.close()
    return {
        "evenstride": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "devices": _devices(),
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if _has(name)],
        "bf16_on_device": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "cpu_limits": limits.kind,
        "cpu_limits_caveat": caveat,
        "live_processes_seen": hasattr(os, "pidfd_open"),
    }


def examine_group() -> Findings | None:
    """Return what the launcher's ranks find out together, on rank 0; ``None`` on the others.

    Makes a Gloo group of its own, and takes it down again.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        mine = {
            "rank": dist.get_rank(),
            "worker": myself(dist.get_rank()).name,
            "architecture": platform.machine(),
            "torch": torch.__version__,
            "devices": _devices(),
            "gflops_per_s": round(measured_flops_per_s() / 1e9, 2),
        }
        ranks: list[Findings] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        error, latency_s, large_s = gradient_error(), reduce_s(_SMALL), reduce_s(_LARGE)
        fastest = max(rank["gflops_per_s"] for rank in ranks)
        return (
            {
                "ranks": ranks,
                "gradient_error": error,
                "exact": error <= 1e-12,
                "all_reduce_latency_s": latency_s,
                "all_reduce_bytes_per_s": 4 * _LARGE / large_s,
                "slow": [r["worker"] for r in ranks if r["gflops_per_s"] < _SLOW * fastest],
                "same_torch": len({rank["torch"] for rank in ranks}) == 1,
            }
            if dist.get_rank() == 0
            else None
        )
    finally:
        take_down_group()


def gradient_error() -> float:
    """Return the relative error of a weighted gradient over unequal batches; collective.

    Rank ``k`` has ``3 + 6 k`` samples of one batch; DDP's plain mean is off by 0.76 on two.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [3 + 6 * k for k in range(world_size)]
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(sum(sizes), 5, dtype=torch.float64, generator=generator)
    start = sum(sizes[:rank])
    weights = torch.randn(1, 5, dtype=torch.float64, generator=generator)
    alone, net = (nn.Linear(5, 1, bias=False, dtype=torch.float64) for _ in range(2))
    for module in (alone, net):
        module.weight.data.copy_(weights)
    alone(data).square().mean().backward()
    model = DistributedDataParallel(net)
    loss = model(data[start : start + sizes[rank]]).square().mean()
    (loss * loss_factor(world_size, sizes[rank], sum(sizes))).backward()
    assert net.weight.grad is not None, "the backward pass has run"
    assert alone.weight.grad is not None, "the backward pass has run"
    difference = (net.weight.grad - alone.weight.grad).norm() / alone.weight.grad.norm()
    return float(difference)


def tell(findings: Findings) -> str:
    """Return the findings as a block of lines that can be posted."""
    told = {name: value for name, value in findings.items() if name != "group" and value != ""}
    lines = [f"{name:20} {_text(value)}" for name, value in told.items()]
    group = findings.get("group")
    if group:
        lines += ["", f"{len(group['ranks'])} ranks"]
        lines += [
            f"  rank {r['rank']:<4} {r['worker']:20} {r['architecture']:10} torch {r['torch']:14} "
            f"{_text(r['devices'])}  {r['gflops_per_s']:.1f} GFLOP/s"
            for r in group["ranks"]
        ]
        lines += [
            f"exact gradients      {'yes' if group['exact'] else 'NO'} "
            f"(relative error {group['gradient_error']:.1e} over unequal batches)",
            f"all-reduce           {group['all_reduce_latency_s'] * 1e3:.2f} ms for 8 bytes, "
            f"{group['all_reduce_bytes_per_s'] / 1e6:.0f} MB/s for 4 MiB",
            f"slow ranks           {', '.join(group['slow']) or 'none'}",
        ]
        if not group["same_torch"]:
            lines.append("warning              the ranks run different versions of torch")
    return "\n".join(lines)


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["cpu"]
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _has(backend: str) -> bool:
    return bool(dist.is_available() and dist.is_backend_available(backend))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
