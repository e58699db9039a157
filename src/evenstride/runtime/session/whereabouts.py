"""What a rank's training thread is doing, as heartbeats tell the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.parameter_server.async_worker import AsyncWorker
from evenstride.runtime.timing.rank_clock import RankClock


class Whereabouts:
    """Tells where the training thread is, to any thread.

    Args:
        clock: of this rank's steps.
        gate: where the thread may wait for a decision.
        free: may wait for its servers; ``None`` where workers keep step.
    """

    def __init__(self, clock: RankClock, gate: DrawBarrier, free: AsyncWorker | None) -> None:
        self._clock, self._gate, self._free = clock, gate, free
        self._agreeing = False

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Tell that this rank is in a call of all ranks."""
        self._agreeing = True
        try:
            yield
        finally:
            self._agreeing = False

    def at(self) -> tuple[str, int]:
        """Return the phase and the step."""
        timer = self._clock.timer
        phase, step = timer.at
        if self._free is not None and self._free.waits:
            # A phase in which a rank that does not come is looked for.
            return "sync", step
        if phase == "data" and self._gate.waiting:
            return "decision", step + 1
        if self._agreeing:
            return "agreement", step
        left = phase != "sync" and timer.left
        return "left" if left else phase, step
