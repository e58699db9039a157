"""How many steps pass between two exchanges, and when a worker asks for one earlier.

An exchange costs every rank some processor time, whatever the step takes. So `ExchangeInterval` is
bounded below in seconds rather than in steps; on fast steps it spans more of them. A worker whose
own times leave its `ToleranceBand` asks at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

HICCUP_S = 0.2
"""A slow stretch may be a hiccup of the machine unless it lasts longer than this, in seconds."""


@dataclass(frozen=True, slots=True)
class ToleranceBand:
    """The times that are expected of one worker at one share, and how many have left them.

    A slow step may be a spike, so it takes two in a row, and as many as outlast a hiccup of the
    machine; a fast one cannot be. After asking,
    the band stays silent until it is set anew, which every exchange does.

    Args:
        share: the share the expectation is for; steps at another share are not judged.
        expected_s: expected busy time; 0 for no expectation.
        part: half-width of the band as a part of the expected time.
        strikes: slow steps in a row.
        slow_s: how long they took together, in seconds.
        asked: whether it has asked since it was set.
    """

    share: int = 0
    expected_s: float = 0.0
    part: float = 0.0
    strikes: int = 0
    asked: bool = False
    slow_s: float = 0.0

    def step(self, share: int, busy_s: float) -> ToleranceBand:
        """Return the band after one more step; ``asked`` turns true when it leaves the band."""
        # Steps that were drawn before the decision still come at the former share.
        if self.asked or self.expected_s == 0 or share != self.share:
            return self
        if busy_s < self.expected_s * (1 - self.part):
            return replace(self, asked=True)
        if busy_s > self.expected_s * (1 + self.part):
            slow_s = self.slow_s + busy_s
            asked = self.strikes >= 1 and slow_s >= HICCUP_S
            return replace(self, strikes=self.strikes + 1, asked=asked, slow_s=slow_s)
        # Usual again, so the slow steps before were spikes.
        return replace(self, strikes=0, slow_s=0.0) if self.strikes else self


@dataclass(frozen=True, slots=True)
class ExchangeInterval:
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

    def following(self, *, changed: bool, step_s: float) -> ExchangeInterval:
        """Return the cadence after an exchange.

        Args:
            changed: whether the shares changed, or soon may.
            step_s: expected step time in seconds; 0 if not known.
        """
        longest = self._steps_in(self.longest_s, step_s)
        # After a change the next times matter most, so the back-off begins again at the shortest.
        shortest = min(self._steps_in(self.shortest_s, step_s), longest)
        steps = shortest if changed else min(max(2 * self.steps, shortest), longest)
        return replace(self, steps=steps)

    def _steps_in(self, seconds: float, step_s: float) -> int:
        # While no step time is known, short intervals are the way to learn it.
        steps = ceil(seconds / step_s) if step_s > 0 else self.fewest_steps
        return min(max(steps, self.fewest_steps), self.most_steps)
