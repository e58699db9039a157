"""The start of a run: the settings of a `Stride`, its environment, and the team it forms."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Unpack

import torch.distributed as dist

from evenstride.errors import ConfigError
from evenstride.runtime.coordination.agreement import Plain, agree
from evenstride.runtime.coordination.leader_outputs import open_records
from evenstride.runtime.coordination.leader_start import Lead, make_leader, team_of
from evenstride.runtime.coordination.settings_agreement import compare, show_settings
from evenstride.runtime.environment import Environment, read_environment
from evenstride.runtime.script_saves import guard_saves
from evenstride.runtime.settings import Settings, StrideArguments, averages, batch_of, settings_of
from evenstride.runtime.sinks.sink_settings import sinks_of
from evenstride.runtime.store.store_channel import open_channel
from evenstride.runtime.team import Team, group_of
from evenstride.runtime.trial import keep_apart
from evenstride.runtime.usage_errors import tell_if_overruled

logger = logging.getLogger("evenstride")


def settle(
    process_group: dist.ProcessGroup | None,
    global_batch: int | str,
    bounds: tuple[int, int] | None,
    **asked: Unpack[StrideArguments],
) -> tuple[Settings, Environment, dist.ProcessGroup | None]:
    """Return the settings of a `Stride`, its environment and its process group.

    An error of one rank in environment, batch or sinks is raised on all ranks.
    """
    try:
        environment = keep_apart(read_environment(os.environ))
        guard_saves(environment.checkpoints)
        sync = asked["sync"] or environment.sync or "bsp"
        batch = batch_of(global_batch, bounds, environment.global_batch, averages=averages(sync))
        if environment.calibrate is not None:  # a calibration tries batch sizes of its own
            batch = replace(batch, chosen=False)
        sinks = asked["sinks"]
        asked["sinks"] = sinks_of(environment.sinks if sinks is None else sinks)
        settings = settings_of(environment, batch, **asked)
    except ConfigError as error:
        refuse_everywhere(error, process_group)
        raise
    group = group_of(process_group, environment.world_size)
    if settings.bounds is None and (group is None or dist.get_rank(group) == 0):
        tell_if_overruled(settings.global_batch, environment.global_batch)
    return settings, environment, group


def refuse_everywhere(error: ConfigError, group: dist.ProcessGroup | None) -> None:
    """Raise an error of this rank on all ranks, so that none waits for it in ``Stride()``."""

    def show() -> Plain:
        raise error

    if dist.is_available() and dist.is_initialized():
        group = group or dist.group.WORLD
        assert group is not None, "the default group exists once torch.distributed is initialised"
        if dist.get_world_size(group) > 1:
            agree(open_channel(group), "Stride()", show, lambda _: {})
    raise error


def form_team(
    settings: Settings,
    group: dist.ProcessGroup | None,
    shard_group: dist.ProcessGroup | None = None,
) -> tuple[Team, Lead | None]:
    """Return the team, and on rank 0 its leader; collective over ``group``.

    Args:
        settings: those of this rank.
        group: the ranks that train together; ``None`` with one process.
        shard_group: the ranks of this rank's shard group; ``None`` for this rank alone.

    Raises:
        ConfigError: settings of some rank are invalid or differ between ranks; raised on all ranks.
        WorkerLost: some rank did not create its `Stride` within the group's timeout.
    """
    leads: list[Lead] = []

    def judge(shown: list[Plain]) -> Plain:
        compare(shown, group)
        lead, formed = make_leader(settings, shown)
        open_records(lead.leader, settings, len(shown))
        for sentence in settings.mode.forgoes if group is not None else ():
            logger.warning("sync=%s: %s", settings.mode, sentence)
        leads.append(lead)
        return formed

    if group is None:
        formed = judge([show_settings(settings, 0, None, shard_group)])
        return team_of(formed, 0, None, None), leads[0]
    channel = open_channel(group)

    def show() -> Plain:
        return show_settings(settings, channel.rank, group, shard_group)

    formed = agree(channel, "Stride()", show, judge)
    return team_of(formed, channel.rank, group, channel), leads[0] if leads else None
