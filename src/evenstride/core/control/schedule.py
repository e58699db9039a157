"""Which shares are in force at which step, as every rank knows it."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass

from evenstride.core.arrays import Shares


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decisions with the step each takes effect at, ascending.

    A step's shares are the same on every rank because a rank never draws a step before it has
    received all decisions that can take effect at or before it. ``checksum`` covers every
    decision since the start, pruned ones included, so that ranks can prove they agree.
    """

    entries: tuple[tuple[int, Shares], ...]
    checksum: int = 0

    @classmethod
    def opening(cls, shares: Shares, step: int = 0) -> Schedule:
        """Return the schedule in which ``shares`` hold from ``step`` on."""
        return cls(()).decided(step, shares)

    @property
    def latest(self) -> int:
        """Step at which the latest decision takes effect."""
        return self.entries[-1][0]

    def shares_at(self, step: int) -> Shares:
        """Return the shares of the step.

        Raises:
            KeyError: the step lies before everything that is still remembered.
        """
        latest_step, shares = self.entries[-1]
        if step >= latest_step:  # nearly always
            return shares
        index = bisect_right(self.entries, step, key=lambda entry: entry[0])
        if index == 0:
            raise KeyError(f"step {step} is before the first decision kept")
        return self.entries[index - 1][1]

    def decided(self, step: int, shares: Shares) -> Schedule:
        """Return the schedule after one more decision; it must not rewrite the past."""
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
