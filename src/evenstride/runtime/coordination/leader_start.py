"""Creates the leader: from the settings of all ranks to the fleet and its opening split."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from evenstride.core.allocation.integer_splits import spans
from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.policies.static import is_fixed
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.leader import Leader, verdict_from_plain, verdict_to_plain
from evenstride.runtime.engines.replica_groups import Islands, islands_of
from evenstride.runtime.failures.peers import Peer, packed, unpacked
from evenstride.runtime.host.machine_resources import comparable
from evenstride.runtime.loading.micro_batch_limits import Spans
from evenstride.runtime.settings import Settings
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.team import Team
from evenstride.runtime.timing.progress_file import StepFile


@dataclass(frozen=True, slots=True)
class Lead:
    """The parts that only rank 0 has: the leader, and the file with its step count, if any."""

    leader: Leader
    step_file: StepFile | None


def make_leader(settings: Settings, shown: list[Plain]) -> tuple[Lead, Plain]:
    """Return the leader, and the team that it announces to all ranks."""
    control = Control(settings.decides, memory_fraction=settings.memory_fraction)
    islands = islands_of([mine["island"] for mine in shown])
    leader = Leader(
        control,
        islands,
        lockstep=settings.mode.lockstep,
        bounds=settings.bounds if settings.chosen else None,
    )
    formed = _formed(leader, settings, shown)
    formed["islands"] = None if islands is None else islands.members
    return Lead(leader, StepFile(settings.step_file) if settings.step_file else None), formed


def _formed(leader: Leader, settings: Settings, shown: list[Plain]) -> Plain:
    peers = [Peer(**mine["peer"]) for mine in shown]
    workers = tuple(
        Worker(
            peer.name,
            mine["min_share"],
            mine["max_share"],
            quantum=mine["quantum"],
            device=peer.device,
            slot=peer.slot,
            **known,
        )
        for peer, mine, known in zip(
            peers, shown, comparable([mine["resources"] for mine in shown]), strict=True
        )
    )
    event = FleetFormed(0, 0, settings.global_batch, workers)
    verdict = leader.form(event, [peer.place for peer in peers])
    return {
        "verdict": verdict_to_plain(verdict),
        "peers": packed(peers),
        "spans": spans_of_ranks(leader.control, leader.islands, verdict.shares or ()),
    }


def spans_of_ranks(control: Control, islands: Islands | None, shares: Shares) -> Spans:
    """Return the smallest and the largest share that each rank may get in a full step.

    ``control`` has formed a fleet, whose workers are the shard groups if there are any. ``shares``
    are the opening shares of the ranks.
    """
    fleet = control.fleet
    assert fleet is not None, "the leader has just formed it"
    if is_fixed(control.policy):
        return tuple((share, share) for share in shares)
    ends = spans(fleet.lower, fleet.upper, fleet.global_batch, fleet.quanta)
    of_workers = zip(*(end.tolist() for end in ends), strict=True)
    if islands is None:
        return tuple(of_workers)
    of_ranks = [(0, 0)] * islands.size
    for island, (fewest, most) in zip(islands.members, of_workers, strict=True):
        for rank in island:
            of_ranks[rank] = fewest // len(island), -(-most // len(island))
    return tuple(of_ranks)


def team_of(
    formed: Plain, rank: int, group: dist.ProcessGroup | None, channel: Channel | None
) -> Team:
    """Return the team that the leader has announced to a rank; see `make_leader`."""
    verdict = verdict_from_plain(formed["verdict"])
    assert verdict.shares is not None, "a fleet forms with an opening split"
    peers = unpacked(formed["peers"])
    islands = formed["islands"]
    return Team(
        rank=rank,
        world_size=len(peers),
        group=group,
        channel=channel,
        peers=peers,
        shares=verdict.shares,
        opening=verdict.opening,
        islands=None if islands is None else Islands(tuple(map(tuple, islands))),
        spans=tuple((fewest, most) for fewest, most in formed["spans"]),
    )
