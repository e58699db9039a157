"""Ends a program that saves: after an exception, with an exit code, or because ranks leave.

Before ranks leave, the state is saved. All ranks end at the same agreed step, because a process
group cannot continue without one of its ranks. The launcher restarts the remaining ones, which
resume from the checkpoint at that step.
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

# After an exception, how long to wait for the running save: other ranks may be gone. If the
# exception says that one is, the save can succeed only if just rank 0's manifest was missing.
_LAST_WAIT_S, _LOST_WAIT_S = 10.0, 2.0

logger = logging.getLogger("evenstride")


def last_wait_s(error: BaseException | None) -> float:
    return _LOST_WAIT_S if is_of_collectives(error) else _LAST_WAIT_S


class _Unflushable:
    """Wraps a stream; flushing it raises an error."""

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream, self._error = stream, error

    def flush(self) -> None:
        self._stream.flush()
        # Its traceback would mislead: no code has crashed.
        raise self._error.with_traceback(None)

    def __repr__(self) -> str:
        """Return the text that Python prints as the place of the ignored error."""
        return "evenstride: the newest state is not saved, hence exit code 120"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_in_error(error: Exception) -> None:
    """Make an exiting program end with exit code 120; for functions called at exit.

    The exit code is fixed by then, with one exception: if standard output cannot be flushed at the
    very end, Python exits with 120 (documented with `sys.exit`). Unlike with `os._exit`, the other
    exit handlers still run. The interpreter prints the error as an ignored one.
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
    """End this process because the ranks ``going`` are preempted.

    ``close`` closes the connections to the other ranks. ``leads_host``: the whole machine is
    preempted, and this rank ends its launcher.

    Raises:
        SystemExit: this rank is preempted; with exit code 143.
        WorkerLost: other ranks are.
    """
    close()
    if rank in going:
        logger.warning("evenstride: rank %d leaves after step %d (%s)", rank, step, why)
        if leads_host:
            end_launcher()
        raise SystemExit(LEFT)
    named = ", ".join(map(str, going))
    raise WorkerLost(
        f"rank {named} left as announced after step {step} ({why}); restart the run to continue "
        "from that step without it, as an elastic launcher does"
    )
