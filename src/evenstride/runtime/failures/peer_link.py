"""What ties one rank to the others: decisions, heartbeats, and the news of a loss."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.errors import EvenstrideError, WorkerLost
from evenstride.runtime.coordination.control_plane import ControlPlane, Local, announce_loss
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.failures.heartbeat import (
    STUCK_PHASES,
    Beat,
    Heartbeats,
    diagnose,
    ending_error,
    ending_exception,
    is_of_collectives,
)
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.store.store_channel import Channel, LocalChannel
from evenstride.runtime.team import Team

logger = logging.getLogger("evenstride")

# How long a process that knows of a loss stays, so that the others hear of it. All end together
# then, so that no launcher waits for another one's processes.
_LINGER_S = 0.3
# How long a collective that waits for a lost rank gets to fail by itself.
_STUCK_S = 3.0
_EXIT_CODE = 1
_GONE = re.compile(r"rank (\d+) is gone")

At = Callable[[], tuple[str, int]]
"""What the training thread is doing, and in which step."""


class LossReport:
    """Names a lost rank once, to the user, to the training thread and to the other ranks.

    Args:
        channel: to the other ranks.
        gate: where the training thread hears of it, unless it waits in a collective.
        at: what the training thread is doing, and in which step.
        restarts: whether a launcher starts the ranks again. Then a process whose collective waits
            for the lost rank ends: nothing in it can interrupt the wait, which would last for the
            process group's whole timeout.
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


class PeerLink:
    """A rank's tie to its team: its ``plane``, and a watch over the others if there are some.

    For ``silent_s`` see `Heartbeats`, for ``forgive`` `LossReport`.
    """

    def __init__(
        self,
        local: Local,
        team: Team,
        leader: Leader | None,
        at: At,
        silent_s: float | None = None,
        forgive: Callable[[int], object] | None = None,
    ) -> None:
        self._watch: _LossWatch | None = None
        if team.channel is None:
            self.plane = ControlPlane(LocalChannel(), local, team.shares, leader)
            return
        # Where others go on without a lost rank, a wait for it ends by itself.
        restarts = silent_s is not None and forgive is None
        loss = LossReport(team.channel, local.gate, at, restarts=restarts, forgive=forgive)
        self.plane = ControlPlane(team.channel, local, team.shares, leader, loss.heard)
        self._watch = _LossWatch(
            loss, self.plane, team.channel, team.peers, at, silent_s, ring=forgive is None
        )

    @property
    def cpu_s(self) -> float:
        """Processor time our threads have used, in seconds."""
        return self.plane.cpu_s + (self._watch.cpu_s if self._watch is not None else 0.0)

    def begin_with(self, shares: Shares | None) -> None:
        """Note an opening split that replaces the first one; nothing if there is none."""
        if shares is not None:
            self.plane.begin_with(shares)

    def explain_failure(self) -> None:
        """Raise why a collective never came through, where there are other ranks."""
        if self._watch is not None:
            self._watch.explain_failure()

    def beats(self) -> dict[int, Beat]:
        """Return the latest heartbeat of every rank."""
        return {} if self._watch is None else self._watch.beats()

    def close(self, *, at_exit: bool) -> None:
        """Part from the others; at the end of the program, say why if it is an error."""
        error = ending_error() if at_exit else None
        if self._watch is not None:
            self._watch.announce(error, at_exit=at_exit)
        self.plane.close()
        if self._watch is not None:
            self._watch.close(error)


class _LossWatch:
    """Watches over the other ranks: heartbeats, and which of them is lost if one is."""

    def __init__(
        self,
        loss: LossReport,
        plane: ControlPlane,
        channel: Channel,
        peers: tuple[Peer, ...],
        at: At,
        silent_s: float | None,
        *,
        ring: bool,
    ) -> None:
        self._loss, self._plane, self._channel, self._at = loss, plane, channel, at
        self._failed = False
        self._liveness = Heartbeats(channel, peers, self._phase, self._found, silent_s, ring=ring)

    @property
    def cpu_s(self) -> float:
        return self._liveness.cpu_s

    def beats(self) -> dict[int, Beat]:
        return self._liveness.beats()

    def explain_failure(self) -> None:
        """Name the rank whose loss broke this rank's collective."""
        self._look_for_the_lost()
        raise WorkerLost(
            self._loss.text or f"a collective of step {self._at()[1]} failed on this rank"
        )

    def announce(self, error: str | None, *, at_exit: bool) -> None:
        """Tell the others why this program ends, if it ends by an error."""
        if at_exit and collective_failed(self._at()[0]):
            self._look_for_the_lost()
        elif error is not None:
            rank = self._channel.rank
            text = f"rank {rank} is gone: it ended with {error}"
            announce_loss(self._channel, self._plane.exchange, rank, text)

    def close(self, error: str | None) -> None:
        self._liveness.close(self._at()[1], error)
        # A thread that has not ended still uses the connections.
        if not self._plane.running:
            self._channel.close()

    def _look_for_the_lost(self) -> None:
        self._failed = True
        step = self._at()[1]
        look_for_the_lost(self._loss, self._liveness, self._channel.rank, step, self._found)

    def _found(self, rank: int, how: str) -> None:
        self._loss.found(rank, how, self._plane.exchange)

    def _phase(self) -> tuple[str, int]:
        phase, step = self._at()
        return ("failed" if self._failed else phase), step
