"""Run a training script as one worker of the lab, under its CPU limit.

python -m evenstride.lab.processes.lab_worker SCRIPT ...

The worker first imports torch, at full speed. Then it connects to the lab's Unix socket, sends its
number, and waits. The lab puts the process under its limit and starts all workers at once. The
connection stays open until the worker ends.
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
    """Report to the lab as ``worker``, wait for the start, and return the connection."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall((json.dumps({"worker": worker, "pid": os.getpid()}) + "\n").encode())
        answer = connection.recv(8)
    except OSError as error:
        connection.close()
        raise LaunchError(f"the lab ended before worker {worker} started: {error}") from None
    if answer != b"go\n":
        connection.close()
        raise LaunchError("the lab ended before it started the workers")
    return connection


def main(arguments: list[str]) -> None:
    """Report to the lab, then run the script ``arguments[0]`` with the other arguments."""
    die_with_parent()
    # With its own process group, the lab can stop and continue the worker with its children.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    import_to_train("evenstride.runtime.stride")  # before the limit applies
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
