"""Taking a process group down without hanging."""

from __future__ import annotations

import time

import torch.distributed as dist


def take_down_group() -> None:
    """Destroy the default process group.

    In torch 2.6 the destructor joins the group's threads while it holds the interpreter, and
    such a thread may be waiting for the interpreter to let go of a tensor that Python has seen:
    a deadlock. Leaving the interpreter to it for a moment beforehand avoids it.
    """
    time.sleep(0.01)
    dist.destroy_process_group()
