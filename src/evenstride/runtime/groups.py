"""Process groups of our own, beside the one the engine averages over."""

from __future__ import annotations

import torch.distributed as dist

from evenstride.runtime.setup import Team


def own_group(team: Team, backend: str | None = None) -> dist.ProcessGroup | None:
    """Return another group of the same ranks, of the default backend if none is named; collective.

    Among these ranks alone: other groups may do the same at the same time, or never.
    """
    if team.group is None or team.channel is None:
        return None
    ranks = dist.get_process_group_ranks(team.group)
    other: dist.ProcessGroup = dist.new_group(
        ranks, team.channel.timeout, backend, use_local_synchronization=True
    )
    return other
