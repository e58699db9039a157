"""The split that a run begins with, and what may replace it before the first step."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.continuity import Continuity
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.timing.recorder import Recorder


class OpeningSplit:
    """Puts another opening split in force on this rank.

    Args:
        recorder: of this rank's steps.
        gate: that each step's shares come from.
        progress: of this rank.
        begin_with: lets the control thread know another split.
        calls: of all ranks.
        continuity: reads what a checkpoint has kept.
        leader: on rank 0 only.
    """

    def __init__(
        self,
        recorder: Recorder,
        gate: DrawBarrier,
        progress: CommittedPosition,
        begin_with: Callable[[Shares | None], None],
        calls: RankCalls,
        continuity: Continuity,
        leader: Leader | None,
    ) -> None:
        self._recorder, self._gate, self._progress = recorder, gate, progress
        self._begin_with, self._calls = begin_with, calls
        self._continuity, self._leader = continuity, leader
        self.not_measured = ""
        """Why steps cannot be measured; empty while they can."""

    def skip(self) -> None:
        """Let no first steps wait for decisions."""
        self._gate.skip_opening()
        if self._leader is not None:
            self._leader.skip_opening(self._progress.step)

    def stop_measuring(self, why: str, verdict: Plain) -> None:
        """Report no steps from now on, and put the leader's decision about that in force."""
        self.not_measured = why
        self._recorder.ignore()
        self._replace({"verdict": verdict})
        self._gate.skip_opening()

    def recall(self, remembered: Plain) -> None:
        """Begin with the split for workers that are known from a checkpoint; collective."""
        lead = self._continuity.recalling(self._progress.step, remembered)
        self._replace(self._calls.agree("restore()", dict, lambda _: lead()))

    def _replace(self, plain: Plain) -> None:
        self._begin_with(self._continuity.take_up(plain, self._gate))
