"""When decisions hold, and when the next one is made.

Every rank knows by its `Schedule` which shares are in force at which step. An exchange costs every
rank some processor time, whatever the step takes. So `ExchangeInterval` is bounded below in seconds
rather than in steps; on fast steps it spans more of them. A worker whose own times leave its
`ToleranceBand` asks at once.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil

from evenstride.core.arrays import Shares

HICCUP_S = 0.2
"""A slow stretch may be a hiccup of the machine unless it lasts longer than this, in seconds."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions with the step each takes effect at, ascending.

    A step's shares are the same on every rank because a rank never draws a step before it has
    received all decisions that can take effect at or before it. ``checksum`` covers every decision
    since the start, pruned ones included, so that ranks can prove they agree.
    """

    entries: tuple[tuple[int, Shares], ...]
    checksum: int = 0

    @classmethod
    def opening(cls, shares: Shares, step: int = 0) -> Schedule:
        return cls(()).decided(step, shares)

    @property
    def latest(self) -> int:
        return self.entries[-1][0]

    def shares_at(self, step: int) -> Shares:
        """Return the shares of the step; `KeyError` if it lies before all that is remembered."""
        latest_step, shares = self.entries[-1]
        if step >= latest_step:  # nearly always
            return shares
        index = bisect_right(self.entries, step, key=lambda entry: entry[0])
        if index == 0:
            raise KeyError(f"step {step} is before the first decision kept")
        return self.entries[index - 1][1]

    def decided(self, step: int, shares: Shares) -> Schedule:
        assert not self.entries or step >= self.entries[-1][0], "decisions are in order of step"
        return self.decided_anew(step, shares)

    def decided_anew(self, step: int, shares: Shares) -> Schedule:
        """Return the schedule with a decision in place of all for ``step`` and later ones.

        For a step at which all ranks stand: what was decided for later ones holds for nobody yet.
        """
        kept = tuple(entry for entry in self.entries if entry[0] < step)
        line = f"{step}:{','.join(map(str, shares))};".encode()
        # Chained to the checksum before, so it covers replaced and forgotten decisions too.
        return Schedule((*kept, (step, shares)), zlib.crc32(line, self.checksum))

    def forget_before(self, step: int) -> Schedule:
        """Return the schedule without the decisions that no step from ``step`` on needs."""
        # One less: the decision before ``step`` is the one in force there.
        index = max(0, bisect_right(self.entries, step, key=lambda entry: entry[0]) - 1)
        return Schedule(self.entries[index:], self.checksum)


@dataclass(frozen=True, slots=True)
class ToleranceBand:
    """The times that are expected of one worker at one share, and how many have left them.

    A slow step may be a spike, so it takes two in a row, and as many as outlast a hiccup of the
    machine; a fast one cannot be. After asking,
    the band stays silent until it is set anew, which every exchange does.
    """

    share: int = 0  # the share the expectation is for; steps at another share are not judged
    expected_s: float = 0.0  # expected busy time; 0 for no expectation
    part: float = 0.0  # half-width of the band as a part of the expected time
    strikes: int = 0  # slow steps in a row
    asked: bool = False  # whether it has asked since it was set
    slow_s: float = 0.0  # how long they took together, in seconds

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
    """Exponential back-off between exchanges, reset by every change of shares."""

    steps: int = 1  # current interval in steps
    shortest_s: float = 0.3  # fewest seconds between exchanges while things change
    # Most seconds between exchanges when nothing does; a rank that leaves its band asks for one
    # sooner
    longest_s: float = 5.0
    fewest_steps: int = 4  # fewest steps between exchanges outside the opening phase
    most_steps: int = 512  # steps a rank may have to remember before it reports them

    def following(self, *, changed: bool, step_s: float) -> ExchangeInterval:
        """Return the cadence after an exchange, if shares ``changed`` or soon may.

        ``step_s`` is the expected step time in seconds; 0 if not known.
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
