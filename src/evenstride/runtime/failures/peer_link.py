"""What ties one rank to the others: decisions, heartbeats, and the news of a loss."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.control_plane import ControlPlane, Local, announce_loss
from evenstride.runtime.coordination.messages import BatchChange
from evenstride.runtime.failures.failure_report import (
    LossReport,
    collective_failed,
    look_for_the_lost,
)
from evenstride.runtime.failures.heartbeat import Beat, Heartbeats, ending_error
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.store.local_channel import LocalChannel
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.team import Team

At = Callable[[], tuple[str, int]]
"""What the training thread is doing, and in which step."""


class PeerLink:
    """A rank's tie to its team: exchanges, and a watch over the others if there are some.

    Args:
        local: this rank's parts that an exchange reads and moves.
        team: that it is in.
        at: what the training thread is doing, and in which step.
        silent_s: see `Heartbeats`.
        forgive: see `LossReport`.
    """

    def __init__(
        self,
        local: Local,
        team: Team,
        at: At,
        silent_s: float | None = None,
        forgive: Callable[[int], object] | None = None,
    ) -> None:
        self._watch: _LossWatch | None = None
        if team.channel is None:
            self._plane = ControlPlane(LocalChannel(), local, team.shares, team.leader)
            return
        # Where others go on without a lost rank, a wait for it ends by itself.
        restarts = silent_s is not None and forgive is None
        loss = LossReport(team.channel, local.gate, at, restarts=restarts, forgive=forgive)
        self._plane = ControlPlane(team.channel, local, team.shares, team.leader, loss.heard)
        self._watch = _LossWatch(
            loss, self._plane, team.channel, team.peers, at, silent_s, ring=forgive is None
        )

    @property
    def cpu_s(self) -> float:
        """Processor time our threads have used, in seconds."""
        return self._plane.cpu_s + (self._watch.cpu_s if self._watch is not None else 0.0)

    def ask(self) -> None:
        """Ask the leader for an exchange; never waits."""
        self._plane.ask()

    def tick(self, step: int) -> None:
        """Start the exchange that is due once ``step`` steps are committed, on the leader."""
        self._plane.tick(step)

    def begin_with(self, shares: Shares | None) -> None:
        """Note an opening split that replaces the first one; nothing if there is none."""
        if shares is not None:
            self._plane.begin_with(shares)

    def turn(self, turn: BatchChange) -> int | None:
        """Stand still until the batch is decided; ``None`` if no more decisions will come."""
        return self._plane.turn(turn)

    def explain_failure(self) -> None:
        """Raise the reason why a collective of this rank never came through.

        Raises:
            WorkerLost: always, where there are other ranks.
        """
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
        self._plane.close()
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
