"""Creates process groups besides the engine's, and destroys the default one without a deadlock."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from evenstride.runtime.store.store_channel import Channel

_CALM = 3  # looks in a row that find no other thread running, 10 ms apart


def take_down_group() -> None:
    """Destroy the default process group."""
    # In torch 2.6 the destructor joins the group's threads while it holds the interpreter lock.
    # Such a thread may wait for the lock in order to free a tensor: a deadlock.
    let_threads_finish()
    dist.destroy_process_group()


@functools.cache
def let_threads_finish_at_exit() -> None:
    """Make this program wait for its threads when it ends, after all that is registered later."""
    atexit.register(let_threads_finish)


def let_threads_finish(most_s: float = 2.0) -> None:
    """Wait until no other thread of this process runs, for ``most_s`` seconds at most.

    A thread of a process group takes the interpreter lock after each collective, to free its
    tensors. Once Python has begun to end, it ends such a thread in the midst of C++ code, which
    aborts the process. Only Linux shows which threads run; elsewhere this waits for 30 ms. A thread
    that waits for another rank does not count.
    """
    until, calm = time.monotonic() + most_s, 0
    while calm < _CALM and time.monotonic() < until:
        time.sleep(0.01)  # without the interpreter lock
        calm = 0 if _another_runs() else calm + 1


def _another_runs() -> bool:
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            # The state follows the name, which may contain any character.
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if task.name != own and state in "RD":
                return True
    return False


def own_group(
    group: dist.ProcessGroup | None, channel: Channel | None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Return another group of the same ranks, with the default backend if none is named."""
    # A single process has no other rank to communicate with.
    if group is None or channel is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    # With these ranks alone: other groups may do the same at the same time, or never.
    with _unbound(dist.group.WORLD, ranks):
        other: dist.ProcessGroup = dist.new_group(
            ranks, channel.timeout, backend, use_local_synchronization=True
        )
    return other


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup | None, ranks: list[int]) -> Iterator[None]:
    """Let torch create a group of some ranks by itself, not by splitting the world's group."""
    # With `init_process_group(device_id=)` torch splits the communicator of the default group. All
    # ranks of the world must call that, but ranks outside never do (pytorch/pytorch#129965).
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None or len(ranks) == world.size():
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
