"""Make process groups beside the engine's own, and take the default one down without hanging."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from evenstride.runtime.store.store_channel import Channel


def take_down_group() -> None:
    """Destroy the default process group."""
    # In torch 2.6 the destructor joins the group's threads while it holds the interpreter. Such a
    # thread may be waiting for the interpreter to let go of a tensor: a deadlock. Leaving the
    # interpreter to it for a moment avoids it.
    time.sleep(0.01)
    dist.destroy_process_group()


def own_group(
    group: dist.ProcessGroup | None, channel: Channel | None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Return another group of the same ranks, of the default backend if none is named."""
    # A process on its own has nobody to meet.
    if group is None or channel is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    # Among these ranks alone: other groups may do the same at the same time, or never.
    with _unbound(dist.group.WORLD, ranks):
        other: dist.ProcessGroup = dist.new_group(
            ranks, channel.timeout, backend, use_local_synchronization=True
        )
    return other


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup | None, ranks: list[int]) -> Iterator[None]:
    """Let torch make a group of a part of the world by itself, not by splitting the world's."""
    # With `init_process_group(device_id=)` torch splits the communicator of the default group,
    # which all ranks of the world must do, and ranks outside never come (pytorch/pytorch#129965).
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None or len(ranks) == world.size():
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
