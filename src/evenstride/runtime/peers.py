"""Who the other ranks are, and whether their processes still live."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank's process.

    Args:
        rank: in the process group.
        host: host name, for people.
        place: identifies the machine and its process namespace; a process id means something
            only to ranks with the same place.
        pid: process id.
    """

    rank: int
    host: str
    place: str
    pid: int

    @property
    def name(self) -> str:
        """Host and rank, as shown to people."""
        return f"{self.host}/{self.rank}"

    def to_plain(self) -> dict[str, Any]:
        """Return the peer as JSON types."""
        return asdict(self)


def myself(rank: int) -> Peer:
    """Return this process as a peer."""
    return Peer(rank, socket.gethostname() or platform.node(), _place(), os.getpid())


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux, or no /proc: then processes are never compared
        return f"unknown {socket.gethostname()} {os.getpid()}"


def watch_exit(peer: Peer) -> int | None:
    """Return a file descriptor that turns readable when the peer's process ends.

    ``None`` where that cannot be known: another machine or namespace, or no Linux.
    """
    if peer.place != _place() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(peer.pid)
    except OSError:  # already gone; the heartbeats will tell
        return None
