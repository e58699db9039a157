"""Runs commands to their end, and ends the processes that a test started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

TORCHRUN_S = 40.0
"""Grace period of a process that may be torchrun, which gives its own ranks 30 s."""


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and its process group, and return when the process has exited.

    The process gets SIGTERM first: torchrun's ranks have their own sessions, which only it ends.

    Args:
        process: Started with ``start_new_session=True``.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_to_end(
    command: Sequence[str], deadline_s: float, environment: dict[str, str], **options: Any
) -> tuple[int, str]:
    """Return the exit code and output of a command, which may be torchrun, on the loopback device.

    Args:
        command: Program and arguments.
        deadline_s: Seconds after which `subprocess.TimeoutExpired` is raised. No process outlives
            the call.
        environment: Variables in addition to those of this process.
        **options: Of `subprocess.Popen`.
    """
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        finally:
            end(process, TORCHRUN_S)
    return process.returncode, output
