"""The torchrun agent above a rank: which process it is, and how it is told to end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# As a command line has them: an installed script, a module's name, or its path.
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
    """Tell the torchrun agent of a machine that goes to end too, if this process is its child.

    It would start its workers again otherwise, and the others would wait for them.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    with contextlib.suppress(OSError):
        command = (proc / str(parent) / "cmdline").read_bytes()
        # The parent may also be a shell or a batch system, which is not ours to end.
        if is_agent(command):
            os.kill(parent, signal.SIGTERM)
