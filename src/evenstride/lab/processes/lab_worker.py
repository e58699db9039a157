"""Run a training script as one worker of the lab, which starts under its limit.

python -m evenstride.lab.processes.lab_worker SCRIPT ...

The slow imports are done first, at full speed. Then the worker connects to the lab's Unix socket,
says which one it is, and waits; the lab puts the process under its limit and lets all go at once.
The connection stays open: its end is the worker's.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path

from evenstride._importing import import_to_train
from evenstride.errors import LaunchError
from evenstride.runtime.launching.die_with_parent import die_with_parent

MUSTER_VARIABLE = "_EVENSTRIDE_LAB_MUSTER"


def report_for_duty(path: str, worker: int) -> socket.socket:
    """Report to the lab as ``worker``, wait to be let loose, and return the connection."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall((json.dumps({"worker": worker, "pid": os.getpid()}) + "\n").encode())
        answer = connection.recv(8)
    except OSError as error:
        connection.close()
        raise LaunchError(f"the lab is gone before worker {worker} began: {error}") from None
    if answer != b"go\n":
        connection.close()
        raise LaunchError("the lab ended before the workers were let loose")
    return connection


def main(arguments: list[str]) -> None:
    """Report for duty, then run ``arguments[0]`` as the main program with the rest as its own."""
    die_with_parent()
    # A process group of its own lets the lab stop and continue the worker with its children.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    import_to_train("evenstride.runtime.stride")  # here, before the limit
    import torch

    torch.set_num_threads(1)
    worker = int(os.environ.get("_EVENSTRIDE_LAB_WORKER") or os.environ["LOCAL_RANK"])
    connection = report_for_duty(os.environ[MUSTER_VARIABLE], worker)
    script, sys.argv = arguments[0], arguments
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
