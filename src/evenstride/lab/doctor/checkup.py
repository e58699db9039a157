"""Properties of a machine and of a process group, and the ports on which jobs listen."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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
from evenstride.core.time_model.observation import median
from evenstride.errors import ConfigError
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.runtime.engines.device_support import (
    RankDevice,
    check_backends,
    complaint,
    own_device,
    read_device,
)
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.failures.peers import myself
from evenstride.runtime.host.machine_resources import measured_flops_per_s, usable_cores
from evenstride.runtime.host.network_interfaces import is_loopback
from evenstride.runtime.launching.torchrun_agent import is_agent

Findings = dict[str, Any]

_SMALL, _LARGE = 2, 2**20  # elements of float32, for latency and bandwidth
# Ranks below this speed, relative to the fastest, are listed as slow.
_SLOW = 0.8
_SERVER = "evenstride.runtime.parameter_server.server_process"


def examine_machine() -> Findings:
    """Return the findings of this process about its machine."""
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


def examine_rank(rank: int) -> Findings:
    """Return the findings of one rank about its device and its torch."""
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
    """Return the findings of all ranks of the launcher on rank 0, and ``None`` on the others.

    Creates a Gloo group and destroys it again.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        mine = examine_rank(dist.get_rank())
        # A rank whose torch does not support its GPU cannot compute there.
        flops_per_s = 0.0 if mine["unusable"] else measured_flops_per_s(own_device())
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

    Rank ``k`` has ``3 + 6 k`` samples of one batch. The error of DDP's plain mean is 0.76 on two
    ranks.
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


def reduce_s(elements: int, repeats: int = 9) -> float:
    """Return the median time of an all-reduce of float32 numbers in seconds; collective."""
    numbers, times_s = torch.zeros(elements), list[float]()
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_reduce(numbers)
        times_s.append(time.perf_counter() - started_s)
    return median(tuple(times_s))


def tell(findings: Findings) -> str:
    """Return the findings as a block of lines to post."""
    apart = ("group", "ports")
    plain = {name: value for name, value in findings.items() if name not in apart and value != ""}
    lines = [
        f"{name.removesuffix('_bytes'):20} {_text(_shown(name, value))}"
        for name, value in plain.items()
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
            lines.append("warning              the ranks have different versions of torch")
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
    texts = {
        name.removesuffix("_bytes"): _text(_shown(name, mine[name]))
        for name in names
        if mine.get(name)
    }
    if texts:
        lines.append(" " * 12 + "; ".join(f"{n} {text}" for n, text in texts.items()))
    if mine.get("unusable"):
        lines.append(f"warning     rank {mine['rank']} {_text(mine['unusable'])}")
    return lines


def _abilities(devices: list[RankDevice]) -> Findings:
    """Return lists of the abilities of the devices; an empty string for those without a value."""
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
    """Return why torch's default backends do not suit these ranks; empty if they do."""
    try:
        check_backends(kinds, ["cpu:gloo,cuda:nccl"] * len(kinds))
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


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a process listens."""

    address: str  # bound address; ``0.0.0.0`` and ``::`` are all addresses of the machine
    port: int  # its number
    process: str  # role of the process in the job
    pid: int  # process id
    is_open: bool  # whether other machines can reach it, if no firewall blocks it

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def ports_of_jobs() -> list[Port]:
    """Return the ports of all jobs of this user on this machine."""
    return ports_of(psutil.process_iter())


def ports_of_rank() -> list[Port]:
    """Return the ports of this rank; on local rank 0, also those of the launcher's agent."""
    me = psutil.Process()
    agent = me.parent() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    return ports_of([me, *filter(None, [agent])])


def ports_of(processes: Iterable[psutil.Process]) -> list[Port]:
    """Return the ports of the processes that belong to a job, each once."""
    found: dict[tuple[str, int], Port] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has ended or is another user's
            if role := _role(process):
                for address, number in _listening(process):
                    port = Port(address, number, role, process.pid, not is_loopback(address))
                    found.setdefault((address, number), port)  # children inherit sockets
    return sorted(found.values(), key=lambda port: (port.process, port.pid, port.port))


def tell_ports(ports: list[dict[str, Any]]) -> list[str]:
    """Return lines about ports, with a warning if other machines can reach one."""
    lines = []
    for port in ports:
        where = f"[{port['address']}]" if ":" in port["address"] else port["address"]
        reach = "OPEN to other machines" if port["is_open"] else "this machine only"
        process = f"{port['process']}, pid {port['pid']}"
        lines.append(f"{where + ':' + str(port['port']):22} {process:30} {reach}")
    lines = [f"{'' if n else 'ports':20} {line}" for n, line in enumerate(lines or ["none"])]
    if count := sum(port["is_open"] for port in ports):
        what = "1 port is" if count == 1 else f"{count} ports are"
        lines.append(
            f"{'warning':20} {what} open to other machines, without a password: other machines can "
            "end the job or run code in it. On one machine, start the job with evenstride launch, "
            "which listens on loopback only. On several machines, open the ports only to the "
            "machines of the job (SECURITY.md)"
        )
    return lines


def _role(process: psutil.Process) -> str:
    """Return the role of a process in a job; empty if it belongs to none."""
    command = process.cmdline()
    if "--store-only" in command:
        return "store"
    if is_agent("\0".join(command).encode()):
        return "agent"
    variables = process.environ()
    if not {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= variables.keys():
        return ""
    return "parameter server" if _SERVER in command else f"rank {variables['RANK']}"


def _listening(process: psutil.Process) -> Iterator[tuple[str, int]]:
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            yield connection.laddr.ip, connection.laddr.port
