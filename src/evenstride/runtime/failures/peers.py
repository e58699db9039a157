"""Identity of each rank's process, and whether that process is still alive."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from evenstride.runtime.engines.device_support import device_name, likely_device


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank's process."""

    rank: int  # in the process group
    host: str  # host name, for people
    # Identifies the machine and its process namespace. Process ids are comparable only between
    # ranks with the same place.
    place: str
    pid: int  # process id
    device: str = ""  # fingerprint of the device that computes its steps
    # Index among the workers of its host, the same after a restart; `None` if unknown.
    slot: int | None = None
    up_s: float = 0.0  # uptime of its machine in seconds; 0 if unknown

    @property
    def name(self) -> str:
        """Host and rank, as shown to people."""
        return f"{self.host}/{self.rank}"

    @property
    def device_type(self) -> str:
        """Type of its device, such as ``cuda``."""
        return self.device.partition(" ")[0]

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def packed(peers: Sequence[Peer]) -> dict[str, Any]:
    """Return all ranks' peers, in rank order, as JSON types, with each long text only once.

    Every rank reads the peers of all, so a byte of one costs the number of ranks squared.
    """
    machines = {(peer.host, peer.place, peer.device): None for peer in peers}
    number = {machine: k for k, machine in enumerate(machines)}
    rows = [
        (number[peer.host, peer.place, peer.device], peer.pid, peer.slot, round(peer.up_s))
        for peer in peers
    ]
    return {"machines": list(machines), "rows": rows}


def unpacked(plain: dict[str, Any]) -> tuple[Peer, ...]:
    """Return the peers of `packed`, whose uptimes are whole seconds."""
    return tuple(
        Peer(rank, host, place, pid, device, slot, float(up_s))
        for rank, (machine, pid, slot, up_s) in enumerate(plain["rows"])
        for host, place, device in (plain["machines"][machine],)
    )


def myself(rank: int, device: torch.device | None = None) -> Peer:
    """Return this process as a peer; the device defaults to `likely_device`."""
    slot = os.environ.get("EVENSTRIDE_SLOT") or os.environ.get("LOCAL_RANK") or ""
    return Peer(
        rank,
        socket.gethostname() or platform.node(),
        _place(),
        os.getpid(),
        fingerprint(device or likely_device()),
        int(slot) if slot.isdecimal() else None,
        _up_s(),
    )


def _up_s() -> float:
    try:
        return float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


@lru_cache
def fingerprint(device: torch.device) -> str:
    """Return a text that is equal for devices of the same model."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda {properties.name} {properties.total_memory >> 20} MiB"
    if device.type != "cpu":
        return f"{device.type} {device_name(device)}"
    cpuinfo = Path("/proc/cpuinfo")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"cpu {next(models, platform.processor() or platform.machine())}"


def _place() -> str:
    return _place_of(os.getpid())


@lru_cache(1)  # compared with every peer's
def _place_of(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux, or no /proc: processes are then never compared
        return f"unknown {socket.gethostname()} {pid}"


def watch_exit(peer: Peer) -> int | None:
    """Return a file descriptor that becomes readable when the peer's process ends.

    ``None`` if the process is on another machine or in another namespace, or without Linux.
    """
    if peer.place != _place() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(peer.pid)
    except OSError:  # already gone; its missing heartbeat will show that
        return None
