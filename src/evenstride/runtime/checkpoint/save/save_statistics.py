"""How the saves of a run have gone so far, and what is unsaved."""

from __future__ import annotations

import logging

from evenstride.runtime.checkpoint.format.manifest import Name
from evenstride.runtime.checkpoint.save.save_interval import left_out
from evenstride.runtime.checkpoint.save.saver import COUNTS, SaveResult

logger = logging.getLogger("evenstride")


class SaveStatistics:
    """One rank's account of its saves.

    Args:
        place: that they go to, for people.
        speaks: whether this rank tells people.
    """

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
        """Take note of how a save ended."""
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
        """Take note that a save is due while the one before is still going on."""
        self.count["put_off"] += 1
        if self.count["put_off"] == 1 and self._speaks:
            logger.warning(
                "a checkpoint is due and the one before is still being written, so training "
                "waits; save less often, or to a faster place (how long is in report())"
            )

    def due_in_vain(self) -> None:
        """Take note that a save is due, where workers do not keep step: say so once."""
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
