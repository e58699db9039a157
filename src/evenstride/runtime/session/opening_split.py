"""The split with which a run begins, and what may replace it before the first step."""

from __future__ import annotations

from collections.abc import Callable

from evenstride.core.fleet import Shares
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.run_lifecycle import RunLifecycle
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState


class OpeningSplit:
    """Puts another opening split into force on this rank, before its first step.

    ``begin_with`` passes the split to the control thread.
    """

    def __init__(
        self,
        state: RankState,
        begin_with: Callable[[Shares | None], None],
        calls: RankCalls,
        lifecycle: RunLifecycle,
        leader: Leader | None,
    ) -> None:
        self._recorder, self._gate, self._progress = state.recorder, state.gate, state.progress
        self._begin_with, self._calls = begin_with, calls
        self._lifecycle, self._leader = lifecycle, leader
        self.not_measured = ""  # why steps cannot be measured; empty while they can

    def skip(self) -> None:
        """Stop the opening: no first steps wait for decisions."""
        self._gate.skip_opening()
        if self._leader is not None:
            self._leader.skip_opening(self._progress.step)

    def stop_measuring(self, why: str, verdict: Plain) -> None:
        """Report no steps from now on, and put the leader's decision for that into force."""
        self.not_measured = why
        self._recorder.ignore()
        self._replace({"verdict": verdict})
        self._gate.skip_opening()

    def recall(self, remembered: Plain) -> None:
        """Begin with a split for workers that are known from a checkpoint; collective."""
        lead = self._lifecycle.recalling(self._progress.step, remembered)
        self._replace(self._calls.agree("restore()", dict, lambda _: lead()))

    def _replace(self, plain: Plain) -> None:
        self._begin_with(self._lifecycle.take_up(plain, self._gate))
