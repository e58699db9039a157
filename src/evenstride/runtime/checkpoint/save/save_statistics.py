"""How the saves of a run have gone so far, and what is unsaved."""

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
"""What is counted of saves; see `Checkpointer.report`."""

# After failures in a row so many due steps are left out before the next try.
_MOST_LEFT_OUT = 7


def left_out(failures: int) -> int:
    """Return how many due steps are left out after so many failures in a row: 0, 1, 3, then 7.

    >>> [left_out(failures) for failures in range(6)]
    [0, 0, 1, 3, 7, 7]
    """
    return min((1 << max(failures - 1, 0)) - 1, _MOST_LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended."""

    name: Name
    error: str  # why it failed; empty if it did not
    took_s: float
    written_bytes: int  # by this rank
    everywhere: bool = True  # whether all ranks know that it ended like this


class SaveStatistics:
    """One rank's account of its saves to a place; ``speaks`` if this rank tells people."""

    def __init__(self, place: str, *, speaks: bool) -> None:
        self._place, self._speaks = place, speaks
        self._left_out, self._in_vain = 0, False
        self.count: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self.failures_in_row = 0
        self.failed: SaveResult | None = None
        """The last save, if it failed: what was due then is unsaved."""
        self.newest: Name | None = None
        """The newest checkpoint that this run has saved, or was restored from."""

    def note(self, outcome: SaveResult) -> None:
        self.count["save_s"] += outcome.took_s
        self.count["written_bytes"] += outcome.written_bytes
        if outcome.error:
            self.failures_in_row += 1
            self.count["failed"] += 1
            self.failed = outcome
        else:
            if self.failures_in_row and self._speaks:
                logger.info("checkpoints are saved again: %s", outcome.name)
            self.failures_in_row, self.failed, self.newest = 0, None, outcome.name
            self.count["saved"] += 1
        self._left_out = left_out(self.failures_in_row)

    def forgive(self) -> None:
        """Forget that the last save failed: the run ends for another reason."""
        self.failed = None

    def begin_from(self, checkpoint: Name | None) -> None:
        """Note the checkpoint that the run was restored from."""
        self.newest = checkpoint

    def put_off(self) -> None:
        """Count a save that is due while the one before is still going on."""
        self.count["put_off"] += 1
        if self.count["put_off"] == 1 and self._speaks:
            logger.warning(
                "a checkpoint is due and the one before is still being written, so training "
                "waits; save less often, or to a faster place (how long is in report())"
            )

    def due_in_vain(self) -> None:
        """Say once that saves are due and not made, where workers do not keep step."""
        if self._speaks and not self._in_vain and not self.count["saved"]:
            logger.warning(
                "a checkpoint is due, and step() saves nothing in this mode of synchronisation, in "
                "which workers do not keep step; call save() on every rank where an epoch has "
                "ended"
            )
        self._in_vain = True

    def leaves_out(self) -> bool:
        """Return whether a save that is due is left out, because those before failed."""
        if not self._left_out:
            return False
        self._left_out -= 1
        self.count["left_out"] += 1
        return True

    @property
    def error(self) -> str:
        """What is unsaved and why, in one sentence; empty if nothing is."""
        if self.failed is None:
            return ""
        known = "there is none yet" if self.newest is None else f"it is {self.newest}"
        return (
            f"the state of step {self.failed.name.step} could not be saved to {self._place}: "
            f"{self.failed.error}; free or repair it, and start again from the newest checkpoint "
            f"({known})"
        )

    @property
    def cost_s(self) -> float:
        """Seconds of training that a save has cost this rank, on average; 1 before the first."""
        saves = self.count["saved"] + self.count["failed"]
        lost_s = self.count["copied_s"] + self.count["blocked_s"]
        return lost_s / saves if saves else 1.0
