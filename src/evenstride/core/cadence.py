"""How many steps pass between two exchanges: often while things change, seldom when calm.

An exchange costs every rank some processor time, whatever the step takes. So the interval is
bounded below in seconds rather than in steps; on fast steps it spans more of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True, slots=True)
class Cadence:
    """Exponential back-off between exchanges, reset by every change of shares.

    Args:
        steps: current interval in steps.
        shortest_s: fewest seconds between exchanges while things change.
        longest_s: most seconds between exchanges when nothing does; a rank that leaves its
            band asks for one sooner.
        fewest_steps: fewest steps between exchanges outside the opening phase.
        most_steps: steps a rank may have to remember before it reports them.
    """

    steps: int = 1
    shortest_s: float = 0.3
    longest_s: float = 5.0
    fewest_steps: int = 4
    most_steps: int = 512

    def following(self, *, changed: bool, step_s: float) -> Cadence:
        """Return the cadence after an exchange.

        Args:
            changed: whether the shares changed, or soon may.
            step_s: expected step time in seconds; 0 if not known.
        """
        longest = self._steps_in(self.longest_s, step_s)
        shortest = min(self._steps_in(self.shortest_s, step_s), longest)
        steps = shortest if changed else min(max(2 * self.steps, shortest), longest)
        return replace(self, steps=steps)

    def _steps_in(self, seconds: float, step_s: float) -> int:
        steps = ceil(seconds / step_s) if step_s > 0 else self.fewest_steps
        return min(max(steps, self.fewest_steps), self.most_steps)
