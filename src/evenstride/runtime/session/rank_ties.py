"""What ties a rank to the others: the exchanges, the heartbeats and the calls of all ranks."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.core.gradients.noise_accumulator import StepParts
from evenstride.runtime.coordination.continuity import Continuity
from evenstride.runtime.coordination.control_plane import Local
from evenstride.runtime.coordination.messages import Position
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.environment import USUAL_SILENT_S, Environment
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.failures.survivors import Survivors
from evenstride.runtime.parameter_server.async_worker import AsyncWorker
from evenstride.runtime.session.opening_split import OpeningSplit
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.whereabouts import Whereabouts
from evenstride.runtime.team import Team


class RankTies:
    """One rank's ties; collective to make, and threads run from then on.

    Args:
        state: of this rank.
        team: of all ranks.
        free: synchronises, where workers do not keep step; else ``None``.
        environment: of this process.
        ask: asks the leader for an exchange.
    """

    def __init__(
        self,
        state: RankState,
        team: Team,
        free: AsyncWorker | None,
        environment: Environment,
        ask: Callable[[], None],
    ) -> None:
        self._state, gate, clock = state, state.gate, state.clock
        self.survivors = None if free is None else Survivors(free, team.shares, gate)
        """Who is there, in modes in which the others go on without a worker that is lost."""
        self.continuity = Continuity(
            ask, team.rank, team.peers, team.leader, self._over, environment.notices or "auto"
        )
        self.whereabouts = Whereabouts(clock, gate, free)
        # Others go on without a rank that is lost there, so silence is always watched.
        silent_s, forgive = environment.silent_s, None
        if free is not None:
            silent_s, forgive = silent_s or USUAL_SILENT_S, free.lost
        self.link = PeerLink(self._local(), team, self.whereabouts.at, silent_s, forgive)
        self.calls = RankCalls(
            team.channel,
            team.group,
            clock,
            gate,
            state.progress,
            self.link.beats,
            self.whereabouts,
            self.survivors,
        )
        self.opening = OpeningSplit(
            state.recorder,
            gate,
            state.progress,
            self.link.begin_with,
            self.calls,
            self.continuity,
            team.leader,
        )
        self.drift = DriftGuard(clock)

    def split(self) -> Shares:
        """Return the shares by which all ranks cut data alike, at whatever step each of them is."""
        if self.survivors is None:
            return self._state.latest_shares()
        return self.survivors.split()

    def close(self, *, at_exit: bool) -> None:
        """Part from the others."""
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
            self.continuity.saves,
            self._state.peaks.take,
            self.continuity.notified.told,
            self._noise,
        )

    def _position(self) -> Position:
        progress = self._state.progress
        return progress.now if self.survivors is None else progress.steps_alone

    def _noise(self) -> tuple[StepParts, ...]:
        noise = self._state.noise
        return () if noise is None else noise.take()
