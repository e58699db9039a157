"""The link of one rank to the others: decisions, heartbeats and reports of a loss."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.errors import EvenstrideError, WorkerLost
from evenstride.runtime.coordination.control_plane import (
    LOST,
    ControlPlane,
    Local,
    announce_loss,
)
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

# A process that knows of a loss stays alive for this time, so that the others receive the report.
# All ranks then end together, and no launcher waits for the processes of another one.
_LINGER_S = 0.3
# A collective that waits for a lost rank has this time to fail by itself.
_STUCK_S = 3.0
_EXIT_CODE = 1
_GONE = re.compile(r"rank (\d+) is gone")

At = Callable[[], tuple[str, int]]
"""Returns the phase and the step of the training thread."""


class LossReport:
    """Reports a lost rank once, to the user, the training thread and the other ranks.

    Args:
        channel: Connection to the other ranks.
        gate: Passes the error to the training thread, unless that waits in a collective.
        at: Returns the phase and the step of the training thread.
        restarts: Whether a launcher restarts the ranks. If so, a process ends when its collective
            waits for the lost rank: the wait cannot be interrupted and would last for the whole
            timeout of the process group.
        forgive: For runs that may continue without a rank: called with each lost rank, returns
            whether the others can continue. It is not asked about rank 0, the leader, nor about
            this rank itself, whose samples the others then train.
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

    def heard_of_any(self) -> bool:
        """Return whether a loss is known; ask the store, as the control thread may have ended."""
        if self.text is None and self._channel.has([LOST]):
            self.heard(*self._channel.read([LOST]))
        return self.text is not None

    def found(self, rank: int, how: str, exchange: int) -> None:
        """Announce a loss that this rank detected in the given exchange."""
        text = f"rank {rank} is gone: {how}"
        if self.heard(text):
            announce_loss(self._channel, exchange, rank, text)

    def heard(self, text: str) -> bool:
        """Handle the report of a loss; return whether it is new."""
        with self._lock:
            if text in self._forgiven or self.text is not None:
                return False
        # Outside the lock, because it calls the parameter servers and waits for their answers.
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
            logger.warning("evenstride: %s; the other ranks continue and train its samples", text)
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
            text = f"the other ranks declared rank {self._channel.rank} (this rank) lost: " + (
                text.removeprefix(own)
            )
            if ending_exception() is None:  # otherwise Python is about to print its own error
                logger.error("evenstride: %s", text)
        self._gate.fail(WorkerLost(f"{text}, so step {max(step, 0)} cannot be finished"))
        if self._restarts:
            self._watch_out((phase, step))
        return True

    def _forgives(self, text: str) -> bool:
        gone = _GONE.match(text)
        if self._forgive is None or gone is None or int(gone[1]) in (0, self._channel.rank):
            return False
        return bool(self._forgive(int(gone[1])))

    def _watch_out(self, at: tuple[str, int]) -> None:
        # A daemon thread, so that a program that ends by itself does not wait for it.
        timer = threading.Timer(_STUCK_S, self._end_if_stuck, (at,))
        timer.name, timer.daemon = "evenstride-stuck", True
        timer.start()

    def _end_if_stuck(self, at: tuple[str, int]) -> None:
        """End this process if it stands in a collective; else look again later."""
        now = self._at()
        if self._gate.delivered:
            return  # the program ends by itself
        if now != at or at[0] not in STUCK_PHASES:
            # A device shows only after seconds, or after further work, that it waits.
            self._watch_out(now)
            return
        logger.error(
            "evenstride: rank %d still waits for the lost rank in a collective that cannot be "
            "interrupted; this process ends so that its launcher can restart it",
            self._channel.rank,
        )
        # sys.exit would end only this timer thread, and the training thread cannot be interrupted.
        logging.shutdown()
        os._exit(_EXIT_CODE)


def look_for_the_lost(
    report: LossReport,
    liveness: Heartbeats,
    rank: int,
    step: int,
    found: Callable[[int, str], None],
) -> None:
    """Diagnose which rank's end broke this rank's collective, and pass it to ``found``.

    For the time that this takes at most, see `diagnose`.
    """
    if report.known():
        return
    try:
        lost = diagnose(liveness, rank, step, report.heard_of_any)
    except RuntimeError:
        report.heard("the process group's store is gone, with the rank or launcher that hosts it")
        return
    if lost is not None:
        found(*lost)
    if report.known():  # wait even if another rank detected it: this rank may host the store
        time.sleep(_LINGER_S)
    elif not isinstance(ending_exception(), EvenstrideError):  # our errors state the cause
        logger.error(
            "evenstride: a collective of step %d failed on rank %d, but all ranks still respond; "
            "see the error above for the cause",
            step,
            rank,
        )


def collective_failed(phase: str) -> bool:
    """Return whether a failed collective is ending this program."""
    if isinstance(ending_exception(), KeyboardInterrupt):
        return False
    return phase == "sync" or is_of_collectives(ending_exception())


class PeerLink:
    """The link of a rank to its team: its ``plane`` and, with several ranks, the watch for losses.

    See `Heartbeats` for ``silent_s`` and `LossReport` for ``forgive``.
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
        # If the others continue without a lost rank, a wait for it ends by itself.
        restarts = silent_s is not None and forgive is None
        loss = LossReport(team.channel, local.gate, at, restarts=restarts, forgive=forgive)
        self.plane = ControlPlane(team.channel, local, team.shares, leader, loss.heard)
        self._watch = _LossWatch(
            loss, self.plane, team.channel, team.peers, at, silent_s, ring=forgive is None
        )

    @property
    def cpu_s(self) -> float:
        """CPU time of our threads, in seconds."""
        return self.plane.cpu_s + (self._watch.cpu_s if self._watch is not None else 0.0)

    def begin_with(self, shares: Shares | None) -> None:
        """Replace the first opening split, unless ``shares`` is ``None``."""
        if shares is not None:
            self.plane.begin_with(shares)

    def explain_failure(self) -> None:
        """Raise an error that names the lost rank, if there are other ranks."""
        if self._watch is not None:
            self._watch.explain_failure()

    def beats(self, ranks: list[int]) -> dict[int, Beat]:
        """Return the latest heartbeats of some ranks."""
        return {} if self._watch is None else self._watch.beats(ranks)

    def close(self, *, at_exit: bool) -> None:
        """Disconnect. If an error ends the program (``at_exit``), report it to the other ranks."""
        error = ending_error() if at_exit else None
        if self._watch is not None:
            self._watch.announce(error, at_exit=at_exit)
        self.plane.close()
        if self._watch is not None:
            self._watch.close(error)


class _LossWatch:
    """Watches the heartbeats of the other ranks and identifies a lost rank."""

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

    def beats(self, ranks: list[int]) -> dict[int, Beat]:
        return self._liveness.beats(ranks)

    def explain_failure(self) -> None:
        """Raise an error that names the rank whose loss broke this rank's collective."""
        self._look_for_the_lost()
        raise WorkerLost(
            self._loss.text or f"a collective of step {self._at()[1]} failed on this rank"
        )

    def announce(self, error: str | None, *, at_exit: bool) -> None:
        """Report to the others why this program ends, if an error ends it."""
        if at_exit and collective_failed(self._at()[0]):
            self._look_for_the_lost()
        elif error is not None:
            rank = self._channel.rank
            text = f"rank {rank} is gone: it ended with {error}"
            announce_loss(self._channel, self._plane.exchange, rank, text)

    def close(self, error: str | None) -> None:
        self._liveness.close(self._at()[1], error)
        # A thread that is still running uses the connections.
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
