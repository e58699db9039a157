"""How a program that saves ends: by an exception, with an exit code, or because ranks leave.

Where ranks will be taken away, the state is saved, so nothing is lost. Those who go end; so do the
others, because a process group cannot go on without a member: their launcher starts them again, and
they go on from the checkpoint with the same step. All of them end at the same step, by a decision
that all know.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.run_lifecycle import LEFT
from evenstride.runtime.failures.heartbeat import is_of_collectives
from evenstride.runtime.launching.torchrun_agent import end_launcher

# How long an end by an exception waits for the save that is going on: others may be gone. Where
# the exception says so, it could end well only if all that was missing was rank 0's manifest.
_LAST_WAIT_S, _LOST_WAIT_S = 10.0, 2.0

logger = logging.getLogger("evenstride")


def last_wait_s(error: BaseException | None) -> float:
    return _LOST_WAIT_S if is_of_collectives(error) else _LAST_WAIT_S


class _Unflushable:
    """A stream that cannot be flushed, and otherwise is another one."""

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream, self._error = stream, error

    def flush(self) -> None:
        self._stream.flush()
        # Where it was raised first is of no use to people: nothing has crashed.
        raise self._error.with_traceback(None)

    def __repr__(self) -> str:
        """Return what Python names as the place of the error, when it shows that one."""
        return "evenstride: the newest state is unsaved, hence exit code 120"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_in_error(error: Exception) -> None:
    """Let this program, which is ending, end with exit code 120; for functions called at exit.

    The exit code is settled by then, but for one case: where the standard output cannot be
    flushed at the very end, Python ends with 120 (documented with `sys.exit`). So everything
    else that is to be done at exit is still done, unlike with `os._exit`; the interpreter shows
    the error as one that it ignores.
    """
    sys.stdout = _Unflushable(sys.stdout, error)


def part(
    close: Callable[[], None],
    step: int,
    rank: int,
    going: tuple[int, ...],
    why: str,
    *,
    leads_host: bool,
) -> NoReturn:
    """End this rank's part in the run, because the ranks ``going`` will be taken away.

    ``close`` parts from the others in order. ``leads_host``: this rank speaks to the launcher for
    its machine, all of which goes.

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
