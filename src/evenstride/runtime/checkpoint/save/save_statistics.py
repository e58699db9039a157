"""Counts the saves of a run, and reports the state that is not saved."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from evenstride.runtime.checkpoint.format.manifest import Name

logger = logging.getLogger("evenstride")

COUNTS = (
    "saved",
    "failed",
    "put_off",
    "left_out",
    "copied_s",
    "blocked_s",
    "save_s",
    "written_bytes",
)
"""The counters of saves; see `Checkpointer.report`."""

# After several failures in a row, at most this many due saves are skipped before the next try.
_MOST_LEFT_OUT = 7


def left_out(failures: int) -> int:
    """Return the number of due saves to skip after some failures in a row: 0, 1, 3, then 7.

    >>> [left_out(failures) for failures in range(6)]
    [0, 0, 1, 3, 7, 7]
    """
    return min((1 << max(failures - 1, 0)) - 1, _MOST_LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The outcome of a save."""

    name: Name
    error: str  # why it failed; empty if it succeeded
    took_s: float
    written_bytes: int  # by this rank
    everywhere: bool = True  # whether all ranks know this outcome


class SaveStatistics:
    """One rank's statistics of its saves to a folder; ``speaks`` if this rank logs."""

    def __init__(self, place: str, *, speaks: bool) -> None:
        self._place, self._speaks = place, speaks
        self._left_out, self._in_vain = 0, False
        self.count: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self.failures_in_row = 0
        self.failed: SaveResult | None = None
        """The last save, if it failed: its state is not saved."""
        self.newest: Name | None = None
        """The newest checkpoint that this run has saved or was restored from."""

    def note(self, outcome: SaveResult) -> None:
        self.count["save_s"] += outcome.took_s
        self.count["written_bytes"] += outcome.written_bytes
        if outcome.error:
            self.failures_in_row += 1
            self.count["failed"] += 1
            self.failed = outcome
        else:
            if self.failures_in_row and self._speaks:
                logger.info("saving checkpoints works again: %s", outcome.name)
            self.failures_in_row, self.failed, self.newest = 0, None, outcome.name
            self.count["saved"] += 1
        self._left_out = left_out(self.failures_in_row)

    def forgive(self) -> None:
        """Forget that the last save failed: the cause is a lost rank."""
        self.failed = None

    def begin_from(self, checkpoint: Name | None) -> None:
        """Note the checkpoint that the run was restored from."""
        self.newest = checkpoint

    def postponed(self) -> None:
        """Count a save that is due while the previous one is still running."""
        self.count["put_off"] += 1
        if self.count["put_off"] == 1 and self._speaks:
            logger.warning(
                "a checkpoint is due and the previous one is still being written, so training "
                "waits; save less often, or to faster storage (report() has the waiting time)"
            )

    def due_in_vain(self) -> None:
        """Warn once, in an asynchronous mode, that a save is due and `step` does not save."""
        if self._speaks and not self._in_vain and not self.count["saved"]:
            logger.warning(
                "a checkpoint is due, but step() does not save in this synchronisation mode, in "
                "which the workers are at different steps; call save() on every rank at the end of "
                "an epoch"
            )
        self._in_vain = True

    def leaves_out(self) -> bool:
        """Return whether to skip a due save after earlier failures."""
        if not self._left_out:
            return False
        self._left_out -= 1
        self.count["left_out"] += 1
        return True

    @property
    def error(self) -> str:
        """The unsaved step and the cause, in one sentence; empty if all is saved."""
        if self.failed is None:
            return ""
        known = "none exists yet" if self.newest is None else f"{self.newest}"
        return (
            f"the state of step {self.failed.name.step} could not be saved to {self._place}: "
            f"{self.failed.error}; free space or repair the storage, and restart from the newest "
            f"checkpoint ({known})"
        )

    @property
    def cost_s(self) -> float:
        """The mean training time, in seconds, that a save costs this rank; 1 before the first."""
        saves = self.count["saved"] + self.count["failed"]
        lost_s = self.count["copied_s"] + self.count["blocked_s"]
        return lost_s / saves if saves else 1.0
