"""Process groups of our own, beside the one the engine averages over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from evenstride.runtime.setup import Team


def own_group(team: Team, backend: str | None = None) -> dist.ProcessGroup | None:
    """Return another group of the same ranks, of the default backend if none is named; collective.

    Among these ranks alone: other groups may do the same at the same time, or never.
    """
    if team.group is None or team.channel is None:
        return None
    ranks = dist.get_process_group_ranks(team.group)
    with _unbound(dist.group.WORLD, ranks):
        other: dist.ProcessGroup = dist.new_group(
            ranks, team.channel.timeout, backend, use_local_synchronization=True
        )
    return other


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup | None, ranks: list[int]) -> Iterator[None]:
    """Let torch make a group of a part of the world by itself, not by splitting the world's.

    With ``init_process_group(device_id=)`` torch splits the communicator of the default group,
    which all ranks of the world must do. Ranks outside the new group never come.

    Source:
        pytorch/pytorch#129965.
    """
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None or len(ranks) == world.size():
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
