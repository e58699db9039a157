"""The end of a group of ranks because some of them will be taken away.

Their state is saved, so nothing is lost. Those who go end; so do the others, because a process
group cannot go on without a member: their launcher starts them again, and they go on from the
checkpoint with the same step. All of them end at the same step, by a decision that all know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.continuity import LEFT
from evenstride.runtime.launching.torchrun_agent import end_launcher

logger = logging.getLogger("evenstride")


def part(
    close: Callable[[], None],
    step: int,
    rank: int,
    going: tuple[int, ...],
    why: str,
    *,
    leads_host: bool,
) -> NoReturn:
    """End this rank's part in the run.

    Args:
        close: parts from the others in order.
        step: that all ranks end at.
        rank: this rank.
        going: the ranks that will be taken away.
        why: for people.
        leads_host: whether this rank speaks to the launcher for its machine, all of which goes.

    Raises:
        SystemExit: this rank is one of them; with exit code 143.
        WorkerLost: others are.
    """
    close()
    if rank in going:
        logger.warning("evenstride: rank %d leaves after step %d (%s)", rank, step, why)
        if leads_host:
            end_launcher()
        raise SystemExit(LEFT)
    named = ", ".join(map(str, going))
    raise WorkerLost(
        f"rank {named} has left as announced after step {step} ({why}); start again to go on from "
        "that step without it, as an elastic launcher does"
    )
