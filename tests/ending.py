"""Ends the processes that a test started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

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
