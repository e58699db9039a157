"""Run a training script as one worker of the lab.

python -m evenstride.lab.processes.lab_worker SCRIPT ...

The slow imports are done first, at full speed; then the worker waits until it is limited.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from evenstride._importing import import_to_train
from evenstride.lab.processes.start_barrier import MUSTER_VARIABLE, report_for_duty
from evenstride.runtime.launching.die_with_parent import die_with_parent


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
