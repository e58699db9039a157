"""When all ranks save together, and who ends after it, as the leader has decided.

A decision to save travels with the verdict of an exchange. It names a number of committed steps
that no rank has reached before it has heard of it, so all ranks save the same state without a
message of their own, and training never waits for the question.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class SaveSchedule:
    """What one rank knows of the saves to come. Written by the control thread.

    Args:
        ask: asks the leader for an exchange.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._due = set[int]()
        self._going: dict[int, tuple[tuple[int, ...], str]] = {}
        self._next: int | None = None
        self._wanted = ""
        self.save_s: float | None = None
        """Seconds that a save takes, on the leader; ``None`` if nobody saves."""

    def takes(self, save_s: float | None) -> None:
        """Note how long a save takes, in seconds; ``None`` if nobody saves."""
        self.save_s = save_s

    def ask(self, reason: str) -> None:
        """Let all ranks save soon (leader only). May be called again until they do."""
        with self._lock:
            asked, self._wanted = bool(self._wanted), reason
        # Outside the lock: it sends a message, and the control thread takes the lock, too.
        if not asked:
            self._ask()

    def take_wanted(self) -> str:
        """Return why a save was asked for, and forget it; nothing if it was not (leader only)."""
        with self._lock:
            wanted, self._wanted = self._wanted, ""
        return wanted

    def agreed(self, steps: int, *, save: bool, going: tuple[int, ...] = (), why: str = "") -> None:
        """Note what all ranks do when ``steps`` steps are committed (control thread)."""
        with self._lock:
            if save:
                self._due.add(steps)
            if going:
                self._going[steps] = going, why
            self._next = min((*self._due, *self._going), default=None)

    @property
    def parting(self) -> bool:
        """Whether some ranks will end soon, as announced."""
        with self._lock:
            return bool(self._going)

    def pending(self, steps: int) -> bool:
        """Return whether something is due by now; cheap, for every step (training thread)."""
        # Without the lock, for speed: `_next` is set before the gate lets training go on to that
        # step.
        at = self._next
        return at is not None and at <= steps

    def due(self, steps: int) -> bool:
        """Return whether a save is due when ``steps`` steps are committed; it is not then again."""
        with self._lock:
            due = {at for at in self._due if at <= steps}
            self._due -= due
            self._next = min((*self._due, *self._going), default=None)
        return bool(due)

    def going(self, steps: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks that end now, and why; none as a rule."""
        with self._lock:
            at = [known for known in self._going if known <= steps]
            gone = [self._going.pop(known) for known in at]
            self._next = min((*self._due, *self._going), default=None)
        ranks = tuple(sorted({rank for one, _ in gone for rank in one}))
        return ranks, "; ".join(why for _, why in gone)
