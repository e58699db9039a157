"""The team: the ranks that train together, as they have agreed."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from evenstride.core.fleet import Shares
from evenstride.errors import ConfigError
from evenstride.runtime.engines.replica_groups import Islands
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.loading.micro_batch_limits import Spans
from evenstride.runtime.store.store_channel import Channel


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that train together, as they have agreed."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None  # that the engine averages over; `None` with one process
    channel: Channel | None  # to the other ranks, likewise
    peers: tuple[Peer, ...]  # in rank order
    shares: Shares  # the opening split
    opening: bool  # whether the first steps wait for decisions
    islands: Islands | None = None  # that the ranks are on; `None` if each is balanced by itself
    # The fewest and the most samples that each rank may get in a full step, as far as bounds and
    # policy go; memory may change them.
    spans: Spans = ()

    @property
    def neighbours(self) -> int:
        """Ranks on this rank's machine, itself included."""
        here = self.peers[self.rank].place
        return sum(peer.place == here for peer in self.peers)


def group_of(group: dist.ProcessGroup | None, world_size: int) -> dist.ProcessGroup | None:
    """Return the process group to train over; ``None`` when there is one process only.

    ``group`` is what the script gave, and ``world_size`` what the launcher says.
    """
    initialised = dist.is_available() and dist.is_initialized()
    if not initialised:
        if world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE is {world_size}, but there is no process group, so every "
                "rank would train alone; call torch.distributed.init_process_group() before "
                "Stride()"
            )
        return None
    group = group or dist.group.WORLD
    assert group is not None, "the default group exists once torch.distributed is initialised"
    if dist.get_rank(group) < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process group given to Stride(), so it would "
            "train alone; make the Stride only on the ranks of that group"
        )
    return group if dist.get_world_size(group) > 1 else None
