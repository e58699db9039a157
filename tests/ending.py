"""End what a test started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

TORCHRUN_S = 40.0
"""Grace of a process that may be torchrun, which gives its own ranks 30 s."""


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and its group; returns once it is gone, whether it ended by itself or not.

    It is asked to end first: torchrun's ranks are in sessions of their own, which only it ends.

    Args:
        process: started with ``start_new_session=True``.
        grace_s: seconds from asking until the group is killed.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
