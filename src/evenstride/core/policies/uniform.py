"""The same share for everyone: what every mainstream stack does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.min_max import apportion
from evenstride.core.fleet import Fleet, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equal shares, apart from a remainder and from bounds."""

    @property
    def opening_steps(self) -> int:
        """None: there is nothing to find out."""
        return 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        """Return the equal split."""
        equal = apportion(np.ones(len(fleet)), fleet.global_batch, fleet.lower, fleet.upper)
        return None, Move(as_shares(equal), "equal split")

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        """Keep it."""
        del state, situation
        return None, Keep("the equal split is fixed")
