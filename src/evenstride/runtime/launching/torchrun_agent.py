"""The torchrun agent that started a rank: how to find it, and how to end it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# Forms on a command line: an installed script, a module's name, or its path.
_AGENTS = (
    b"torchrun",
    b"torch.distributed.run",
    b"torch/distributed/run",
    b"evenstride.lab.processes.rendezvous",
    b"evenstride/lab/processes/rendezvous",
)


def is_agent(command: bytes) -> bool:
    """Return whether a command line is that of a torchrun agent."""
    return any(word in command for word in _AGENTS)


def end_launcher(proc: Path = Path("/proc")) -> None:
    """End the torchrun agent of a machine that leaves, if this process is the agent's child.

    Otherwise the agent would restart its workers, and the other ranks would wait for them.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    with contextlib.suppress(OSError):
        command = (proc / str(parent) / "cmdline").read_bytes()
        # The parent may also be a shell or a batch system, which must keep running.
        if is_agent(command):
            os.kill(parent, signal.SIGTERM)
