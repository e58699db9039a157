"""What ties one rank to the others: decisions, heartbeats, and the news of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from evenstride.core.fleet import Shares
from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.control_plane import (
    ControlPlane,
    Local,
    SoloPlane,
    announce_loss,
)
from evenstride.runtime.coordination.messages import BatchChange
from evenstride.runtime.failures.failure_report import (
    LossReport,
    collective_failed,
    look_for_the_lost,
)
from evenstride.runtime.failures.heartbeat import Beat, Heartbeats, ending_error
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.team import Team

At = Callable[[], tuple[str, int]]
"""What the training thread is doing, and in which step."""


class PeerLink(Protocol):
    """A rank's tie to its team."""

    @property
    def cpu_s(self) -> float:
        """Processor time our threads have used, in seconds."""
        ...

    def ask(self) -> None:
        """Ask the leader for an exchange; never waits."""
        ...

    def tick(self, step: int) -> None:
        """Note that ``step`` steps are committed."""
        ...

    def begin_with(self, shares: Shares | None) -> None:
        """Note an opening split that replaces the first one; nothing if there is none."""
        ...

    def turn(self, turn: BatchChange) -> int | None:
        """Stand still until the batch is decided; ``None`` if no more decisions will come."""
        ...

    def explain_failure(self) -> None:
        """Raise the reason why a collective of this rank never came through."""
        ...

    def beats(self) -> dict[int, Beat]:
        """Return the latest heartbeat of every rank."""
        ...

    def close(self, *, at_exit: bool) -> None:
        """Part from the others; at the end of the program, say why if it is an error."""
        ...


class SoloLink:
    """A single process: its own leader, tied to nobody."""

    def __init__(self, local: Local, team: Team, at: At) -> None:
        assert team.leader is not None, "a single process leads itself"
        self._plane = SoloPlane(local, team.shares, team.leader)
        self._at = at
        self.cpu_s = 0.0

    def ask(self) -> None:
        """Exchange with oneself after the present step."""
        self._plane.ask()

    def begin_with(self, shares: Shares | None) -> None:
        """Nothing to note: a lone worker has the whole batch."""

    def tick(self, step: int) -> None:
        """Exchange with oneself when it is due."""
        self._plane.tick(step)

    def turn(self, turn: BatchChange) -> int | None:
        """Have the next epoch's batch chosen."""
        return self._plane.turn(turn)

    def explain_failure(self) -> None:
        """No collective, so none has failed."""

    def beats(self) -> dict[int, Beat]:
        """Return nothing: a lone process has no heartbeat."""
        return {}

    def close(self, *, at_exit: bool) -> None:
        """Nobody to part from; what was measured since the latest exchange is kept."""
        del at_exit
        self._plane.close(self._at()[1])


class TeamLink:
    """One of several processes: a control thread, a heartbeat, and an ear for losses."""

    def __init__(
        self,
        local: Local,
        team: Team,
        channel: Channel,
        at: At,
        silent_s: float | None,
        forgive: Callable[[int], object] | None = None,
    ) -> None:
        self._channel, self._at, self._failed = channel, at, False
        # Where others go on without a lost rank, a wait for it ends by itself.
        restarts = silent_s is not None and forgive is None
        self._loss = LossReport(channel, local.gate, at, restarts=restarts, forgive=forgive)
        self._plane = ControlPlane(channel, local, team.shares, team.leader, self._loss.heard)
        self._liveness = Heartbeats(
            channel, team.peers, self._phase, self._found, silent_s, ring=forgive is None
        )

    @property
    def cpu_s(self) -> float:
        """Processor time of the control and liveness threads, in seconds."""
        return self._plane.cpu_s + self._liveness.cpu_s

    def ask(self) -> None:
        """Ask the leader for an exchange."""
        self._plane.ask()

    def begin_with(self, shares: Shares | None) -> None:
        """Let the control thread know another opening split."""
        if shares is not None:
            self._plane.begin_with(shares)

    def tick(self, step: int) -> None:
        """Start the exchange that is due, on the leader."""
        self._plane.tick(step)

    def turn(self, turn: BatchChange) -> int | None:
        """Stand still until the batch is decided."""
        return self._plane.turn(turn)

    def explain_failure(self) -> None:
        """Name the rank whose loss broke this rank's collective.

        Raises:
            WorkerLost: always.
        """
        self._look_for_the_lost()
        raise WorkerLost(
            self._loss.text or f"a collective of step {self._at()[1]} failed on this rank"
        )

    def beats(self) -> dict[int, Beat]:
        """Return the latest heartbeat of every rank."""
        return self._liveness.beats()

    def close(self, *, at_exit: bool) -> None:
        """End both threads; at the end of the program tell the others about an error."""
        step = self._at()[1]
        error = ending_error() if at_exit else None
        if at_exit and collective_failed(self._at()[0]):
            self._look_for_the_lost()
        elif error is not None:
            self._announce_own(error)
        self._plane.close()
        self._liveness.close(step, error)
        # A thread that has not ended still uses the connections.
        if not self._plane.running:
            self._channel.close()

    def _look_for_the_lost(self) -> None:
        self._failed = True
        step = self._at()[1]
        look_for_the_lost(self._loss, self._liveness, self._channel.rank, step, self._found)

    def _found(self, rank: int, how: str) -> None:
        self._loss.found(rank, how, self._plane.exchange)

    def _announce_own(self, error: str) -> None:
        rank = self._channel.rank
        text = f"rank {rank} is gone: it ended with {error}"
        announce_loss(self._channel, self._plane.exchange, rank, text)

    def _phase(self) -> tuple[str, int]:
        phase, step = self._at()
        return ("failed" if self._failed else phase), step


def tie(
    local: Local,
    team: Team,
    at: At,
    silent_s: float | None = None,
    forgive: Callable[[int], object] | None = None,
) -> PeerLink:
    """Return the bond of this rank; for ``silent_s`` see `Heartbeats`, else `LossReport`."""
    if team.channel is None:
        return SoloLink(local, team, at)
    return TeamLink(local, team, team.channel, at, silent_s, forgive)
