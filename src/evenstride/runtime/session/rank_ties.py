"""A rank's connections to the others: exchanges, heartbeats and collective calls."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.runtime.coordination.control_plane import Local
from evenstride.runtime.coordination.draw_barrier import Position
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.run_lifecycle import RunLifecycle
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.environment import USUAL_SILENT_S, Environment
from evenstride.runtime.failures.heartbeat import ending_exception
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.failures.survivors import FreeWorker, Survivors
from evenstride.runtime.session.opening_split import OpeningSplit
from evenstride.runtime.session.rank_calls import RankCalls, Whereabouts
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.team import Team


class RankTies:
    """One rank's connections; creating them is collective and starts threads.

    ``free`` synchronises in modes without a common step; otherwise it is ``None``. ``ask`` requests
    an exchange from the leader.
    """

    def __init__(
        self,
        state: RankState,
        team: Team,
        leader: Leader | None,
        free: FreeWorker | None,
        environment: Environment,
        ask: Callable[[], None],
    ) -> None:
        self._state, gate, clock = state, state.gate, state.clock
        # Which workers remain, in modes that continue without a lost worker.
        self.survivors = None if free is None else Survivors(free, team.shares, gate)
        self.lifecycle = RunLifecycle(
            ask, team.rank, team.peers, leader, self._over, environment.notices or "auto"
        )
        whereabouts = Whereabouts(clock, gate, free)
        # In these modes the others continue without a lost rank, so silence is always monitored.
        silent_s, forgive = environment.silent_s, None
        if free is not None:
            silent_s, forgive = silent_s or USUAL_SILENT_S, free.lost
        self.link = PeerLink(self._local(), team, leader, whereabouts.at, silent_s, forgive)
        self.calls = RankCalls(
            team.channel,
            team.group,
            clock,
            gate,
            state.progress,
            self.link.beats,
            whereabouts,
            self.survivors,
        )
        self.opening = OpeningSplit(state, self.link.begin_with, self.calls, self.lifecycle, leader)
        self.drift = DriftGuard(clock)

    def split(self) -> Shares:
        """Return shares that are equal on all ranks, even if the ranks are in different steps."""
        if self.survivors is None:
            return self._state.latest_shares()
        return self.survivors.split()

    def in_order(self, *, at_exit: bool) -> bool:
        """Return whether this rank disconnects without an error that ends its program."""
        return not (at_exit and ending_exception())

    def close(self, *, at_exit: bool) -> None:
        """Disconnect from the other ranks."""
        self.link.close(at_exit=at_exit)
        self.calls.close()
        self.drift.close()

    def _over(self) -> bool:
        return self._state.gate.failed

    def _local(self) -> Local:
        return Local(
            self._state.gate,
            self._state.recorder,
            self._position,
            self.lifecycle.saves,
            self._state.peaks.take,
            self.lifecycle.notified.report,
            self._state.take_noise,
        )

    def _position(self) -> Position:
        progress = self._state.progress
        return progress.now if self.survivors is None else progress.steps_alone
