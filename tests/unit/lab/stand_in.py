"""Plays the interpreter of the lab's workers, and torchrun, without importing torch.

Run with the arguments that the real one would get. The environment variable ``STAND_IN`` is a
JSON object that says what the workers do:

- ``leash``: a named pipe that each worker holds open for as long as it lives.
- ``facts``: a folder in which each worker leaves what it was given.
- ``steps``: a step count to leave in the progress file.
- ``serve``: the number of a worker that starts what looks like a parameter server.
- ``wait``: a named pipe to read a byte from, after that.
- ``hang``: never end.
- ``exit``: the exit code.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from evenstride.lab.processes.lab_worker import MUSTER_VARIABLE, report_for_duty
from evenstride.runtime.launching.die_with_parent import die_with_parent

SERVER_MODULE = "evenstride.runtime.parameter_server.server_process"  # psutil takes long to import

RECORDED = (
    "OMP_NUM_THREADS",
    "EVENSTRIDE_",
    "_EVENSTRIDE_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "OWN",
)


def main(arguments: list[str]) -> None:
    """Be the launcher if that is what is asked for, else a worker."""
    orders = json.loads(os.environ["STAND_IN"])
    if "evenstride.lab.processes.rendezvous" not in arguments:
        worker(int(os.environ["_EVENSTRIDE_LAB_WORKER"]), arguments, orders)
        return
    die_with_parent()
    (count,) = (a for a in arguments if a.startswith("--nproc-per-node="))
    children = []
    for rank in range(int(count.partition("=")[2])):
        child = os.fork()
        if child == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            worker(rank, arguments, orders)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(codes))


def worker(number: int, arguments: list[str], orders: dict[str, Any]) -> None:
    """Report for duty and follow the orders."""
    signal.alarm(100)  # so that none is left where what the tests are about fails
    die_with_parent()
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    leash = os.open(orders["leash"], os.O_WRONLY) if "leash" in orders else -1
    connection = report_for_duty(os.environ[MUSTER_VARIABLE], number)
    if "facts" in orders:
        variables = {k: v for k, v in os.environ.items() if k.startswith(RECORDED)}
        facts = json.dumps({"pid": os.getpid(), "arguments": arguments, "environment": variables})
        Path(orders["facts"], f"worker-{number}.json").write_text(facts)
    if leash >= 0:
        os.write(leash, b"loose\n")
    if "steps" in orders:
        progress = Path(os.environ["_EVENSTRIDE_PROGRESS"])
        progress.write_bytes(struct.pack("<q", orders["steps"]))
    if orders.get("serve") == number:
        # It ends with this process, whose end of the pipe is closed then.
        subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", SERVER_MODULE],
            stdin=subprocess.PIPE,
        )
    if "wait" in orders:
        with Path(orders["wait"]).open("rb", buffering=0) as pipe:
            pipe.read(1)
    if "hang" in orders:
        signal.pause()
    os.write(1, f"worker {number} has had enough\n".encode())  # in one piece
    connection.close()
    os._exit(orders.get("exit", 0))


if __name__ == "__main__":
    main(sys.argv[1:])
