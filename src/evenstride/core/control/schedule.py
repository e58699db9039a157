"""When decisions apply, and when the next one is made.

Every rank knows from its `Schedule` which shares apply at which step. An exchange costs every rank
some processor time, whatever the step time. So `ExchangeInterval` has a lower bound in seconds
rather than in steps; with fast steps it spans more of them. A worker whose times leave its
`ToleranceBand` requests an exchange at once.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil

from evenstride.core.arrays import Shares

HICCUP_S = 0.2
"""A slow stretch longer than this, in seconds, is not regarded as a hiccup of the machine."""
TOLERATED, MOST_OFF, ASKS_AT = 0.2, 0.4, 1.2
"""As parts of a band's half-width: a deviation without meaning, the most that counts of one step,
and the sum at which a worker requests an exchange. The second is twice the first at most. Otherwise
a minority of odd steps, which no median follows, would request exchanges without end."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions with the step at which each takes effect, ascending.

    A step's shares are the same on every rank, because a rank never draws a step before it has
    all decisions that can affect it. ``checksum`` covers every decision since the start, also
    removed ones, so that ranks can prove that they agree.
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
        """Return the shares of the step; `KeyError` if it precedes all kept decisions."""
        latest_step, shares = self.entries[-1]
        if step >= latest_step:  # nearly always
            return shares
        index = bisect_right(self.entries, step, key=lambda entry: entry[0])
        if index == 0:
            raise KeyError(f"step {step} precedes the first decision kept")
        return self.entries[index - 1][1]

    def decided(self, step: int, shares: Shares) -> Schedule:
        assert not self.entries or step >= self.entries[-1][0], "decisions are in order of step"
        return self.replaced_from(step, shares)

    def replaced_from(self, step: int, shares: Shares) -> Schedule:
        """Return the schedule with this decision in place of all for ``step`` and later steps.

        Only for a step at which all ranks stop: no rank has applied a later decision yet.
        """
        kept = tuple(entry for entry in self.entries if entry[0] < step)
        line = f"{step}:{','.join(map(str, shares))};".encode()
        # Chained to the checksum before, so it covers replaced and forgotten decisions too.
        return Schedule((*kept, (step, shares)), zlib.crc32(line, self.checksum))

    def forget_before(self, step: int) -> Schedule:
        """Return the schedule without the decisions that steps from ``step`` on do not need."""
        # One less: the decision before ``step`` applies at that step.
        index = max(0, bisect_right(self.entries, step, key=lambda entry: entry[0]) - 1)
        return Schedule(self.entries[index:], self.checksum)


@dataclass(frozen=True, slots=True)
class ToleranceBand:
    """The expected times of one worker at one share, and the steps outside of them.

    One slow step may be a spike. A request takes two slow steps in a row that last longer than a
    hiccup of the machine; one fast step is enough. Steps that are all a little slow, or all a
    little fast, add up to a request too, after some of them. After a request, the band is silent
    until the next exchange sets it again.

    Source:
        The sums are those of Page, "Continuous inspection schemes" (Biometrika 1954): what steps
        deviate beyond `TOLERATED`, from the latest step on at which nothing was left.
    """

    share: int = 0  # the share of the expected time; steps at another share are ignored.
    expected_s: float = 0.0  # expected busy time; 0 for no expectation.
    part: float = 0.0  # half-width of the band as a fraction of the expected time.
    strikes: int = 0  # slow steps in a row.
    asked: bool = False  # whether it has requested an exchange since it was set.
    slow_s: float = 0.0  # duration of the slow steps together, in seconds.
    # Sums of the deviations of slower and of faster steps, and the duration of the former.
    slower: float = 0.0
    faster: float = 0.0
    slower_s: float = 0.0

    def step(self, share: int, busy_s: float) -> ToleranceBand:
        """Return the band after one more step; ``asked`` turns true when the step leaves it."""
        # Steps drawn before the decision still have the former share.
        if self.asked or self.expected_s == 0 or share != self.share:
            return self
        off = (busy_s / self.expected_s - 1.0) / self.part
        strikes = self.strikes + 1 if off > 1.0 else 0  # after a normal step, others were spikes.
        slow_s = self.slow_s + busy_s if strikes else 0.0
        counted = min(max(off, -MOST_OFF), MOST_OFF)
        slower = min(max(self.slower + counted - TOLERATED, 0.0), ASKS_AT)
        faster = min(max(self.faster - counted - TOLERATED, 0.0), ASKS_AT)
        slower_s = self.slower_s + busy_s if slower else 0.0
        asked = (
            off < -1.0
            or (strikes > 1 and slow_s >= HICCUP_S)
            or (slower == ASKS_AT and slower_s >= HICCUP_S)
            or faster == ASKS_AT
        )
        return ToleranceBand(
            share, self.expected_s, self.part, strikes, asked, slow_s, slower, faster, slower_s
        )


@dataclass(frozen=True, slots=True)
class ExchangeInterval:
    """Exponential back-off between exchanges, reset by every change of shares."""

    steps: int = 1  # current interval in steps
    shortest_s: float = 0.3  # fewest seconds between exchanges while shares change
    # Most seconds between exchanges in a steady state; a rank that leaves its band requests one
    # sooner
    longest_s: float = 5.0
    fewest_steps: int = 4  # fewest steps between exchanges outside the opening
    most_steps: int = 512  # steps that a rank may have to keep before it reports them.
    # Parts of the time that decisions may take, if the limits above allow it: the most, and the
    # usual one. Between them, it is the part of a step that the latest change saves, until
    # decisions exceed the usual part by `allowance` of them.
    most_part: float = 0.1
    usual_part: float = 0.02
    allowance: float = 10.0
    excess: float = 0.0  # decisions beyond those that the usual part of the time allows

    def following(
        self,
        *,
        changed: bool,
        step_s: float,
        gain: float = 1.0,
        decision_s: float = 0.0,
        passed: int = 0,
    ) -> ExchangeInterval:
        """Return the next interval; ``changed`` if shares changed or may change soon.

        ``step_s`` is the expected step time and ``decision_s`` the time of a decision, in seconds;
        0 if not known. ``gain`` is the part of a step that the change is expected to save, because
        the next decision rarely saves more. ``passed`` is the number of steps since the exchange
        before. A decision delays the leader's next step: by some milliseconds, by 20 ms on a core
        that other processes use too, and by more than 0.1 s with a tenth of a core.
        """
        longest = self._steps_in(self.longest_s, step_s)
        # Half the longest, so that a calm run regains its allowance, however slow a decision is.
        usual_s = min(decision_s / self.usual_part, longest * step_s / 2)
        excess = self.excess
        if usual_s > 0:
            excess += 1.0 - passed * step_s / usual_s
            excess = min(max(excess, 0.0), self.allowance + 1.0)
        part = self.usual_part if excess >= self.allowance else max(gain, self.usual_part)
        shortest_s = max(
            self.shortest_s, decision_s / self.most_part, min(decision_s / part, usual_s)
        )
        # After a change the next times matter most, so the back-off starts again at the shortest.
        shortest = min(self._steps_in(shortest_s, step_s), longest)
        steps = shortest if changed else min(max(2 * self.steps, shortest), longest)
        return replace(self, steps=steps, excess=excess)

    def renewed(self) -> ExchangeInterval:
        """Return the shortest interval, for conditions about which earlier steps say nothing."""
        return replace(self, steps=self.fewest_steps, excess=0.0)

    def _steps_in(self, seconds: float, step_s: float) -> int:
        # While no step time is known, short intervals are the way to measure it.
        steps = ceil(seconds / step_s) if step_s > 0 else self.fewest_steps
        return min(max(steps, self.fewest_steps), self.most_steps)
