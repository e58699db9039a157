"""The team: the ranks that train together, and what they have agreed on."""

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
    """The ranks that train together, and what they have agreed on."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None  # that the engine averages over; `None` with one process
    channel: Channel | None  # `None` with one process.
    peers: tuple[Peer, ...]  # in rank order
    shares: Shares  # the opening split.
    opening: bool  # whether the first steps wait for decisions
    islands: Islands | None = None  # the shard groups; `None` if each rank is a worker
    # Smallest and largest share of each rank in a full step, by bounds and policy; the memory of a
    # rank may change them.
    spans: Spans = ()

    @property
    def neighbours(self) -> int:
        """Ranks on this rank's machine, including itself."""
        here = self.peers[self.rank].place
        return sum(peer.place == here for peer in self.peers)


def group_of(group: dist.ProcessGroup | None, world_size: int) -> dist.ProcessGroup | None:
    """Return the process group to train over; ``None`` with one process.

    ``group`` is the script's argument, and ``world_size`` the number set by the launcher.
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
            "train alone; create the Stride only on the ranks of that group"
        )
    return group if dist.get_world_size(group) > 1 else None
