"""When a worker should ask for an exchange at once, decided from its own times alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

HICCUP_S = 0.2
"""A slow stretch may be a hiccup of the machine unless it lasts longer than this, in seconds."""


@dataclass(frozen=True, slots=True)
class Band:
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

    def step(self, share: int, busy_s: float) -> Band:
        """Return the band after one more step; ``asked`` turns true when it leaves the band."""
        if self.asked or self.expected_s == 0 or share != self.share:
            return self
        if busy_s < self.expected_s * (1 - self.part):
            return replace(self, asked=True)
        if busy_s > self.expected_s * (1 + self.part):
            slow_s = self.slow_s + busy_s
            asked = self.strikes >= 1 and slow_s >= HICCUP_S
            return replace(self, strikes=self.strikes + 1, asked=asked, slow_s=slow_s)
        return replace(self, strikes=0, slow_s=0.0) if self.strikes else self
