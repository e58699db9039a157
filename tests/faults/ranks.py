"""Running a script as the ranks of one group, on this machine and without a launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from evenstride.testing.ranks import loopback_store


@contextlib.contextmanager
def started(
    script: Path, world_size: int, folder: Path, arguments: list[str], **variables: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a script as ranks of a group whose store outlives them; leave none behind.

    Each rank's output is added to ``rank-RANK.log`` in the folder.
    """
    with loopback_store() as port:
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 hosts no store
                "TORCHELASTIC_RESTART_COUNT": "0",
                "GLOO_SOCKET_IFNAME": "lo",
                "RES_OPTIONS": "timeout:1 attempts:1",
                **variables,
            }
            with (folder / f"rank-{rank}.log").open("ab") as log:
                command = [sys.executable, str(script), *arguments]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
