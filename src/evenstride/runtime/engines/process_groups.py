"""Creates process groups besides the engine's, and destroys the default one without a deadlock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from evenstride.runtime.store.store_channel import Channel


def take_down_group() -> None:
    """Destroy the default process group."""
    # In torch 2.6 the destructor joins the group's threads while it holds the interpreter lock.
    # Such a thread may wait for the lock in order to free a tensor: a deadlock. Releasing the lock
    # for a moment avoids it.
    time.sleep(0.01)
    dist.destroy_process_group()


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
