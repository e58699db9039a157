"""Form the team: compare all ranks' settings, agree on the workers and the opening split."""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist

from evenstride._version import __version__
from evenstride.core.allocation.min_max import spans
from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alerts
from evenstride.core.fleet import Shares, Worker
from evenstride.core.policies.dynamic_batching import DynamicBatching
from evenstride.core.policies.static import Static, is_fixed
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.agreement import Plain, agree, require_equal
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.messages import verdict_from_plain, verdict_to_plain
from evenstride.runtime.engines.device_support import (
    check_backends,
    check_chosen,
    has_chosen_cuda,
    likely_device,
)
from evenstride.runtime.engines.replica_groups import Islands, islands_of, show_island
from evenstride.runtime.environment import Environment, read_environment
from evenstride.runtime.failures.peers import Peer, myself
from evenstride.runtime.host.declared_resources import (
    comparable,
    measured_flops_per_s,
    usable_cores,
)
from evenstride.runtime.loading.micro_batch_limits import Spans
from evenstride.runtime.script_saves import guard_saves
from evenstride.runtime.settings import (
    Settings,
    StrideArguments,
    averages,
    batch_of,
    check,
    settings_of,
)
from evenstride.runtime.sinks.sink_settings import open_sinks
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from evenstride.runtime.store.store_channel import Channel, open_channel
from evenstride.runtime.timing.progress_file import StepFile
from evenstride.runtime.trial import keep_apart
from evenstride.runtime.usage_errors import tell_if_overruled
from evenstride.trace.read import TRACE_NAME
from evenstride.trace.write import TraceWriter

logger = logging.getLogger("evenstride")


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that train together, as they have agreed.

    Args:
        rank: this rank.
        world_size: number of ranks.
        group: the process group the engine averages over; ``None`` with one process.
        channel: to the other ranks; ``None`` with one process.
        peers: all ranks' processes, in rank order.
        shares: the opening split.
        opening: whether the first steps wait for decisions.
        leader: on rank 0 only.
        step_file: likewise, if one was asked for.
        islands: that the ranks are on; ``None`` if each is balanced by itself.
        spans: the fewest and the most samples that each rank may get in a full step, as far as
            bounds and policy go; memory may change them.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None
    channel: Channel | None
    peers: tuple[Peer, ...]
    shares: Shares
    opening: bool
    leader: Leader | None
    step_file: StepFile | None = None
    islands: Islands | None = None
    spans: Spans = ()

    @property
    def neighbours(self) -> int:
        """Ranks on this rank's machine, itself included."""
        here = self.peers[self.rank].place
        return sum(peer.place == here for peer in self.peers)


def group_of(group: dist.ProcessGroup | None, environment: Environment) -> dist.ProcessGroup | None:
    """Return the process group to train over; ``None`` when there is one process only.

    Raises:
        ConfigError: the launcher made several processes, but there is no process group.
    """
    initialised = dist.is_available() and dist.is_initialized()
    if not initialised:
        if environment.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE is {environment.world_size}, but there is no process group, so every "
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


def settle(
    process_group: dist.ProcessGroup | None,
    global_batch: int | str,
    bounds: tuple[int, int] | None,
    **asked: Unpack[StrideArguments],
) -> tuple[Settings, Environment, dist.ProcessGroup | None]:
    """Return what a `Stride` was asked and what its process is in: environment and group.

    Raises:
        ConfigError: the environment, the batch or a sink cannot be, which is raised on all ranks;
            or there is no process group where there must be one.
    """
    try:
        environment = keep_apart(read_environment(os.environ))
        guard_saves(environment.checkpoints)
        sync = asked["sync"] or environment.sync or "bsp"
        batch = batch_of(global_batch, bounds, environment.global_batch, averages=averages(sync))
        if environment.calibrate is not None:  # which tries sizes of its own
            batch = replace(batch, chosen=False)
        settings = settings_of(environment, batch, **asked)
    except ConfigError as error:
        refuse_everywhere(error, process_group)
        raise
    group = group_of(process_group, environment)
    if settings.bounds is None and (group is None or dist.get_rank(group) == 0):
        tell_if_overruled(settings.global_batch, environment.global_batch)
    return settings, environment, group


def form_team(
    settings: Settings,
    group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None = None,
) -> Team:
    """Return the team; collective over ``group``.

    Args:
        settings: of this rank.
        group: the ranks that train together; ``None`` with one process.
        shard_group: those of them that hold this rank's replica; ``None`` for this rank alone.

    Raises:
        ConfigError: some rank's settings are impossible, or differ between ranks; raised on
            every rank alike.
        WorkerLost: some rank did not come within the group's timeout.
    """
    led: list[tuple[Leader, StepFile | None]] = []

    def show(rank: int) -> Plain:
        chosen = has_chosen_cuda(group)  # before anything here looks at the GPU
        return {
            **_show(settings, rank, likely_device(group)),
            "uses_gpu": chosen,
            "island": show_island(shard_group, group),
        }

    def judge(shown: list[Plain]) -> Plain:
        _compare(shown)
        if group is not None:
            _check_devices(shown, dist.get_backend_config(group))
        control = Control(settings.decides, memory_fraction=settings.memory_fraction)
        islands = islands_of([mine["island"] for mine in shown])
        leader = Leader(control, islands, lockstep=settings.mode.lockstep)
        leader.bounds = settings.bounds if settings.chosen else None
        verdict = _formed(leader, settings, shown)
        verdict["islands"] = None if islands is None else islands.members
        step_file = StepFile(settings.step_file) if settings.step_file else None
        _show_what_happens(leader, settings, len(shown))
        for sentence in settings.mode.forgoes if group is not None else ():
            logger.warning("sync=%s: %s", settings.mode, sentence)
        led.append((leader, step_file))
        return verdict

    if group is None:
        return _team(judge([show(0)]), 0, None, None, *led[0])
    channel = open_channel(group)
    plain = agree(channel, "Stride()", lambda: show(channel.rank), judge)
    return _team(plain, channel.rank, group, channel, *(led[0] if led else (None, None)))


def _check_devices(shown: list[Plain], backend_config: str) -> None:
    """Refuse devices that would wait for each other before the engine is made, where they hang."""
    # A rank that has an accelerator is taken to use it.
    check_backends(["cuda" if mine["cuda"] else "cpu" for mine in shown], backend_config)
    check_chosen([mine["uses_gpu"] if mine["cuda"] else None for mine in shown], backend_config)


def refuse_everywhere(error: ConfigError, group: dist.ProcessGroup | None) -> None:
    """Raise an error of this rank on all ranks, so that none waits for it to make its `Stride`.

    Raises:
        ConfigError: always.
    """

    def show() -> Plain:
        raise error

    if dist.is_available() and dist.is_initialized():
        group = group or dist.group.WORLD
        assert group is not None, "the default group exists once torch.distributed is initialised"
        if dist.get_world_size(group) > 1:
            agree(open_channel(group), "Stride()", show, lambda _: {})
    raise error


def _show(settings: Settings, rank: int, device: torch.device) -> Plain:
    check(settings)
    return {
        "evenstride": __version__,
        "torch": torch.__version__.partition("+")[0],
        "global_batch": settings.global_batch,
        "seed": settings.seed,
        "policy": settings.policy,
        "sync": str(settings.mode),
        "engine": settings.engine,
        "noise_every": settings.noise_every,
        "bounds": None if settings.bounds is None else list(settings.bounds),
        "chosen": settings.chosen,
        "memory_fraction": settings.memory_fraction,
        "max_steps": settings.max_steps,
        "min_share": settings.min_share,
        "max_share": settings.max_share,
        "quantum": settings.quantum,
        "resources": _resources(settings.decides, device),
        "cuda": torch.cuda.is_available(),
        "peer": myself(rank, device).to_plain(),
    }


def _resources(policy: Policy[Any], device: torch.device) -> Plain:
    """Return what the policy wants to know about this worker; measuring takes a moment."""
    match policy:
        case Static(by="cores"):
            return {"cores": usable_cores()}
        case Static(by="flops"):
            return {"flops_per_s": measured_flops_per_s(device)}
        case DynamicBatching():
            cores = {"cores": usable_cores()} if device.type == "cpu" else {}
            return {**cores, "flops_per_s": measured_flops_per_s(device)}
    return {}


_OF_EACH_RANK = (
    "min_share",
    "max_share",
    "quantum",
    "resources",
    "cuda",
    "uses_gpu",
    "peer",
    "island",
)


def _compare(shown: list[Plain]) -> None:
    common = [{k: v for k, v in mine.items() if k not in _OF_EACH_RANK} for mine in shown]
    require_equal(common, "Stride()")


def _show_what_happens(leader: Leader, settings: Settings, world_size: int) -> None:
    """Let the leader tell sinks and trace; of what cannot be opened, nothing stays open."""
    board = TelemetryBoard(open_sinks(settings.sinks), Alerts(settings.alert_below))
    try:
        leader.record_to(_open_trace(settings, world_size, leader))
    except ConfigError:
        board.close()
        raise
    leader.show_on(board)


def _open_trace(settings: Settings, world_size: int, leader: Leader) -> TraceWriter | None:
    if settings.trace is None:
        return None
    path = settings.trace
    path = path if path.suffix == ".jsonl" else path / TRACE_NAME
    try:
        return TraceWriter(path, _header(settings, world_size, leader))
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {error.strerror}") from None


def _header(settings: Settings, world_size: int, leader: Leader) -> dict[str, Any]:
    left_out = ("trace", "step_file", "sinks", "own_policy")
    names = [field.name for field in fields(settings) if field.name not in left_out]
    asked = {name: getattr(settings, name) for name in names}
    return {
        **asked,
        "world_size": world_size,
        "evenstride": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        # Both of one moment, which ties the trace's clock to that of the world.
        "at_s": round(leader.at_s, 6),
        "started_unix_s": round(time.time(), 6),
    }


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
        "peers": [peer.to_plain() for peer in peers],
        "spans": _spans(leader.control, leader.islands, verdict.shares or ()),
    }


def _spans(control: Control, islands: Islands | None, shares: Shares) -> Spans:
    """Return the fewest and the most samples that each rank may get in a full step.

    Args:
        control: that has formed a fleet.
        islands: that are its workers; ``None`` if the ranks are.
        shares: of the ranks at first.
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


def _team(
    plain: Plain,
    rank: int,
    group: dist.ProcessGroup | None,
    channel: Channel | None,
    leader: Leader | None,
    step_file: StepFile | None,
) -> Team:
    verdict = verdict_from_plain(plain["verdict"])
    assert verdict.shares is not None, "a fleet forms with an opening split"
    peers = tuple(Peer(**peer) for peer in plain["peers"])
    islands = plain["islands"]
    return Team(
        rank=rank,
        world_size=len(peers),
        group=group,
        channel=channel,
        peers=peers,
        shares=verdict.shares,
        opening=verdict.opening,
        leader=leader,
        step_file=step_file,
        islands=None if islands is None else Islands(tuple(map(tuple, islands))),
        spans=tuple((fewest, most) for fewest, most in plain["spans"]),
    )
