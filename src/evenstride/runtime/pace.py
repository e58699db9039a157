"""How often to save, by what the run has seen of losses; on the leader."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from evenstride.core.saving import Observed, Saving, expected_losses, next_save_in_s
from evenstride.runtime.peers import Peer

logger = logging.getLogger("evenstride")


class Pace:
    """Counts losses over all of a run's lives, and tells when to save next.

    Args:
        peers: all ranks' processes; a machine counts once, with its age when its ranks met.
        clock: seconds that only grow.
    """

    def __init__(self, peers: Iterable[Peer], clock: Callable[[], float] = time.monotonic) -> None:
        ages_s = {peer.place: peer.up_s for peer in peers}
        self._ages_s = np.array(list(ages_s.values()), dtype=np.float64)
        self._clock, self._begun_s = clock, clock()
        self._before = Observed()
        self.saving = Saving()
        """The model of lifetimes, and the bounds."""

    @property
    def observed(self) -> Observed:
        """Losses so far, in this life of the run and in those before."""
        since_s = self._ages_s + (self._clock() - self._begun_s)
        expected = expected_losses(self.saving.lifetime, self._ages_s, since_s)
        return Observed(self._before.failures, self._before.expected + expected)

    def interval_s(self, save_s: float) -> float:
        """Return the seconds until the next save.

        Args:
            save_s: how long training stands still for one.
        """
        now_s = self._ages_s + (self._clock() - self._begun_s)
        # A save takes nothing at all where it is small; the clock of a test may stand still.
        planned = next_save_in_s(max(save_s, 1e-4), now_s, self.observed, self.saving)
        logger.debug("%s", planned.reason)
        return planned.in_s

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        observed = self.observed
        return {"failures": observed.failures, "expected": observed.expected}

    def recall(self, remembered: Any, *, lost: bool) -> None:
        """Go on counting from what a checkpoint has kept.

        Args:
            remembered: by `remember`; what is none is left out.
            lost: whether the life that saved it ended in a loss. Who starts again from a
                checkpoint was interrupted, unless that was announced.
        """
        plain = remembered if isinstance(remembered, dict) else {}
        failures, expected = plain.get("failures"), plain.get("expected")
        if not (isinstance(failures, int) and isinstance(expected, int | float)):
            return
        if failures >= 0 and 0.0 <= expected < float("inf"):
            self._before = Observed(failures + lost, float(expected))
