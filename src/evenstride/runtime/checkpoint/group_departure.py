"""The end of a group of ranks because some of them will be taken away.

Their state is saved, so nothing is lost. Those who go end; so do the others, because a process
group cannot go on without a member: their launcher starts them again, and they go on from the
checkpoint with the same step. All of them end at the same step, by a decision that all know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import NoReturn

from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.continuity import LEFT
from evenstride.runtime.stride import Stride

logger = logging.getLogger("evenstride")

# As a command line has them: an installed script, a module's name, or its path.
_AGENTS = (
    b"torchrun",
    b"torch.distributed.run",
    b"torch/distributed/run",
    b"evenstride.lab.processes.rendezvous",
    b"evenstride/lab/processes/rendezvous",
)


def part(
    stride: Stride, rank: int, going: tuple[int, ...], why: str, *, leads_host: bool
) -> NoReturn:
    """End this rank's part in the run.

    Args:
        stride: of the run; it is closed.
        rank: this rank.
        going: the ranks that will be taken away.
        why: for people.
        leads_host: whether this rank speaks to the launcher for its machine, all of which goes.

    Raises:
        SystemExit: this rank is one of them; with exit code 143.
        WorkerLost: others are.
    """
    step = stride.step
    stride.close()
    if rank in going:
        logger.warning("evenstride: rank %d leaves after step %d (%s)", rank, step, why)
        if leads_host:
            end_launcher()
        raise SystemExit(LEFT)
    named = ", ".join(map(str, going))
    raise WorkerLost(
        f"rank {named} has left as announced after step {step} ({why}); start again to go on from "
        "that step without it, as an elastic launcher does"
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
