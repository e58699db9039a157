"""What a machine and a process group can do, measured."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride._version import __version__
from evenstride.core.gradients.weighting import loss_factor
from evenstride.errors import ConfigError
from evenstride.lab.doctor.bandwidth import reduce_s
from evenstride.lab.doctor.open_ports import ports_of_jobs, ports_of_rank, tell_ports
from evenstride.lab.limits.cpu_limits import open_limits
from evenstride.runtime.engines.device_support import (
    RankDevice,
    check_backends,
    complaint,
    own_device,
    read_device,
)
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.failures.peers import myself
from evenstride.runtime.host.declared_resources import measured_flops_per_s, usable_cores

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
        "wheel": _wheel(),
        "devices": _devices(),
        **_abilities([read_device(device) for device in _own_devices()]),
        "memory_bytes": [memory_bytes(device) for device in _own_devices()],
        "backends": _backends(),
        "cpu_limits": limits.kind,
        "cpu_limits_caveat": caveat,
        "live_processes_seen": hasattr(os, "pidfd_open"),
    }


def examine_ports() -> list[Findings]:
    return [port.to_plain() for port in ports_of_jobs()]


def examine_rank(rank: int) -> Findings:
    """Return what one rank says about the device it would train on, and the torch it has."""
    device = own_device()
    facts = read_device(device)
    return {
        "rank": rank,
        "worker": myself(rank, device).name,
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "kind": facts.kind,
        "devices": [facts.name if facts.kind == "cuda" else "cpu"],
        "wheel": _wheel(),
        **_abilities([facts]),
        "memory_bytes": [memory_bytes(device)],
        "backends": _backends(),
        "ports": [port.to_plain() for port in ports_of_rank()],
    }


def examine_group() -> Findings | None:
    """Return what the launcher's ranks find out together, on rank 0; ``None`` on the others.

    Makes a Gloo group of its own, and takes it down again.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        mine = examine_rank(dist.get_rank())
        # What has no code for its card cannot compute there.
        flops_per_s = 0.0 if mine["unusable"] else measured_flops_per_s()
        mine["gflops_per_s"] = round(flops_per_s / 1e9, 2)
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
                "backend_warning": backend_warning([rank["kind"] for rank in ranks]),
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
    apart = ("group", "ports")
    told = {name: value for name, value in findings.items() if name not in apart and value != ""}
    lines = [
        f"{name.removesuffix('_bytes'):20} {_text(_shown(name, value))}"
        for name, value in told.items()
    ]
    if "ports" in findings:
        lines += tell_ports(findings["ports"])
    group = findings.get("group")
    if group:
        lines += ["", f"{len(group['ranks'])} ranks"]
        for mine in group["ranks"]:
            lines += _rank_lines(mine)
        lines += [
            f"exact gradients      {'yes' if group['exact'] else 'NO'} "
            f"(relative error {group['gradient_error']:.1e} over unequal batches)",
            f"all-reduce           {group['all_reduce_latency_s'] * 1e3:.2f} ms for 8 bytes, "
            f"{group['all_reduce_bytes_per_s'] / 1e6:.0f} MB/s for 4 MiB",
            f"slow ranks           {', '.join(group['slow']) or 'none'}",
            *tell_ports([port for mine in group["ranks"] for port in mine["ports"]]),
        ]
        if not group["same_torch"]:
            lines.append("warning              the ranks run different versions of torch")
        if group.get("backend_warning"):
            lines.append(f"warning              {group['backend_warning']}")
    return "\n".join(lines)


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _rank_lines(mine: Findings) -> list[str]:
    lines = [
        f"  rank {mine['rank']:<4} {mine['worker']:20} {mine['architecture']:10} "
        f"torch {mine['torch']:14} {_text(mine['devices'])}  {mine['gflops_per_s']:.1f} GFLOP/s"
    ]
    names = ("wheel", "capability", "bf16", "compile", "memory_bytes", "backends")
    told = {
        name.removesuffix("_bytes"): _text(_shown(name, mine[name]))
        for name in names
        if mine.get(name)
    }
    if told:
        lines.append(" " * 12 + "; ".join(f"{n} {text}" for n, text in told.items()))
    if mine.get("unusable"):
        lines.append(f"warning     rank {mine['rank']} {_text(mine['unusable'])}")
    return lines


def _abilities(devices: list[RankDevice]) -> Findings:
    """Return what the devices can do, each a list in their order; ``""`` for what is no matter."""
    return {
        "capability": [d.architecture for d in devices if d.architecture] or "",
        "bf16": [device.bf16 for device in devices],
        "compile": ["yes" if device.compile else "no" for device in devices],
        "unusable": [text for text in map(complaint, devices) if text] or "",
    }


def _own_devices() -> list[torch.device]:
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _wheel() -> str:
    if torch.version.cuda is None:
        return "ROCm" if torch.version.hip else "no CUDA"
    return f"CUDA {torch.version.cuda} for {' '.join(torch.cuda.get_arch_list())}"


def backend_warning(kinds: list[str]) -> str:
    """Return why torch's own choice of backends would not do for these ranks; ``""`` if it does."""
    try:
        check_backends(kinds, "cpu:gloo,cuda:nccl")
    except ConfigError as error:
        return str(error)
    return ""


def _backends() -> list[str]:
    return [name for name in ("gloo", "nccl", "mpi", "ucc") if _has(name)]


def _shown(name: str, value: Any) -> Any:
    if not name.endswith("_bytes"):
        return value
    return [f"{one / 2**30:.1f} GiB" for one in value]


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
