"""How a run ends: in order, or because another rank is gone; each rank says which."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable

from evenstride.errors import EvenstrideError, WorkerLost
from evenstride.runtime.coordination.control_plane import announce_loss
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.failures.collective_errors import is_of_collectives
from evenstride.runtime.failures.heartbeat import (
    STUCK_PHASES,
    Heartbeats,
    diagnose,
    ending_exception,
)
from evenstride.runtime.store.store_channel import Channel

logger = logging.getLogger("evenstride")

# How long a process that knows of a loss stays, so that the others hear of it. All end together
# then, so that no launcher waits for another one's processes.
_LINGER_S = 0.3
# How long a collective that waits for a lost rank gets to fail by itself.
_STUCK_S = 3.0
_EXIT_CODE = 1
_GONE = re.compile(r"rank (\d+) is gone")


class LossReport:
    """Names a lost rank once, to the user, to the training thread and to the other ranks.

    Args:
        channel: to the other ranks.
        gate: where the training thread hears of it, unless it waits in a collective.
        at: what the training thread is doing, and in which step.
        restarts: whether a launcher starts the ranks again. Then a process whose collective waits
            for the lost rank ends: nothing in it can interrupt the wait, which would last for
            the process group's whole timeout.
        forgive: where the others may go on without a rank: told of each one that is gone, and
            returns whether they can. Rank 0, which leads, is missed nevertheless, and so is this
            rank itself: the others have taken it for lost, and train its samples.
    """

    def __init__(
        self,
        channel: Channel,
        gate: DrawBarrier,
        at: Callable[[], tuple[str, int]],
        *,
        restarts: bool = False,
        forgive: Callable[[int], object] | None = None,
    ) -> None:
        self._forgive, self._forgiven = forgive, set[str]()
        self._channel, self._gate, self._at, self._restarts = channel, gate, at, restarts
        self._lock = threading.Lock()
        self.text: str | None = None

    def known(self) -> bool:
        """Return whether a loss is known."""
        return self.text is not None

    def found(self, rank: int, how: str, exchange: int) -> None:
        """Announce that ``rank`` is gone, as this rank has found out in the given exchange."""
        text = f"rank {rank} is gone: {how}"
        if self.heard(text):
            announce_loss(self._channel, exchange, rank, text)

    def heard(self, text: str) -> bool:
        """Another rank has told so; return whether it is news."""
        with self._lock:
            if text in self._forgiven or self.text is not None:
                return False
        # Outside the lock, as it calls the parameter servers and waits for their answers.
        forgiven = self._forgives(text)
        with self._lock:
            # Another thread may have reported it while the lock was free.
            if text in self._forgiven or self.text is not None:
                return False
            if forgiven:
                self._forgiven.add(text)
            else:
                self.text = text
        if forgiven:
            logger.warning("evenstride: %s; the others can go on, and train its samples", text)
            return True
        phase, step = self._at()
        own = f"rank {self._channel.rank} is gone: "
        if not text.startswith(own):
            logger.error(
                "evenstride: %s; rank %d cannot finish step %d (it was in: %s)",
                text,
                self._channel.rank,
                max(step, 0),
                phase,
            )
        else:
            text = f"the other ranks take rank {self._channel.rank}, this one, for lost: " + (
                text.removeprefix(own)
            )
            if ending_exception() is None:  # else its own error is about to be shown
                logger.error("evenstride: %s", text)
        self._gate.fail(WorkerLost(f"{text}, so step {max(step, 0)} cannot be finished"))
        if self._restarts:
            self._watch_out((phase, step), again=True)
        return True

    def _forgives(self, text: str) -> bool:
        gone = _GONE.match(text)
        if self._forgive is None or gone is None or int(gone[1]) in (0, self._channel.rank):
            return False
        return bool(self._forgive(int(gone[1])))

    def _watch_out(self, at: tuple[str, int], *, again: bool) -> None:
        # A daemon, so that a program which ends by itself does not wait for it.
        timer = threading.Timer(_STUCK_S, self._end_if_stuck, (at,), {"again": again})
        timer.name, timer.daemon = "evenstride-stuck", True
        timer.start()

    def _end_if_stuck(self, at: tuple[str, int], *, again: bool) -> None:
        """End this process if it has not moved; look again if only now its device could tell."""
        now = self._at()
        if now != at and again:
            self._watch_out(now, again=False)
        if now != at or at[0] not in STUCK_PHASES:
            return
        logger.error(
            "evenstride: rank %d still waits for it in a collective, which nothing can interrupt; "
            "this process ends, for its launcher to start it again",
            self._channel.rank,
        )
        # Not sys.exit: this is a timer's thread, and the training thread cannot be interrupted.
        logging.shutdown()
        os._exit(_EXIT_CODE)


def look_for_the_lost(
    report: LossReport,
    liveness: Heartbeats,
    rank: int,
    step: int,
    found: Callable[[int, str], None],
) -> None:
    """Find out whose end broke this rank's collective, and pass it to ``found``.

    Takes at most as long as it takes to tell a silent heartbeat from a slow one.
    """
    if report.known():
        return
    try:
        lost = diagnose(liveness, rank, step, report.known)
    except RuntimeError:
        report.heard("the process group's store is gone, and the rank or launcher that hosts it")
        return
    if lost is not None:
        found(*lost)
    if report.known():  # whoever found out: one that heard of it may host the store
        time.sleep(_LINGER_S)
    elif not isinstance(ending_exception(), EvenstrideError):  # which says what is wrong itself
        logger.error(
            "evenstride: what step %d needed of all ranks failed on rank %d, though all of them "
            "answer; the error above says why",
            step,
            rank,
        )


def collective_failed(phase: str) -> bool:
    """Return whether this program is ending because a collective did."""
    if isinstance(ending_exception(), KeyboardInterrupt):
        return False
    return phase == "sync" or is_of_collectives(ending_exception())
