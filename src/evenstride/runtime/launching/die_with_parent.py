"""Run a script or a module as the main program, in a process that dies with its parent.

python -m evenstride.runtime.launching.die_with_parent SCRIPT ...
python -m evenstride.runtime.launching.die_with_parent -m MODULE ...

A program that starts processes may be killed before it can end them.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def run_script(command: Sequence[str]) -> None:
    """Run ``command[0]`` as the main program, with the rest as its arguments."""
    script, sys.argv = command[0], list(command)
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does for a script
    runpy.run_path(script, run_name="__main__")


def run_module(command: Sequence[str]) -> None:
    """Run the module ``command[0]`` as the main program, with the rest as its arguments."""
    module, sys.argv = command[0], list(command)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    die_with_parent()
    if sys.argv[1] == "-m":
        run_module(sys.argv[2:])
    else:
        run_script(sys.argv[1:])
