"""Hands a training over to a second run of its script, which starts while the first still trains.

The processes of the second run start and wait where they create their `Checkpointer`. When all are
ready, the first run is asked to stop: it saves and ends. Then the second run restores. So training
does not stop while processes start. A folder per run holds files, all empty but ``restored``:

- ``ready-0`` ...: written by each rank: it has reached its `Checkpointer`
- ``go``: written by the launcher: the run may continue
- ``restored``: written by rank 0: the position that was restored, as JSON
- ``stop``: written by the launcher: save, and end
- ``saved``: written by rank 0: the save is complete

This is how ``evenstride plan --online`` changes the workers and the batch of a training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.side_agreements import SaveSchedule

READY, GO, RESTORED, STOP, SAVED = "ready", "go", "restored", "stop", "saved"

_POLL_S = 0.002
_WHY = "training continues in other processes"

Agree = Callable[[str, Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]


class Handoff:
    """One rank's side of the handoff; ``agree`` sends rank 0's answer to all ranks."""

    def __init__(
        self, folder: Path, saves: SaveSchedule, rank: int, ranks: tuple[int, ...], agree: Agree
    ) -> None:
        self._folder, self._saves, self._agree = folder, saves, agree
        self._rank, self._ranks = rank, ranks
        self._asked = self._over = False

    def wait(self) -> None:
        """Announce that this rank is ready, and wait until it may continue."""
        (self._folder / f"{READY}-{self._rank}").touch()
        go = self._folder / GO
        # Without a limit: the run that trains now may take any time to save and end.
        while not go.exists():
            time.sleep(_POLL_S)

    def went_on(self, **at: Any) -> None:
        """Publish the position that was restored."""
        if self._rank == 0:
            # Renamed when complete, so that a reader never sees partial JSON.
            whole = self._folder / f"{RESTORED}.new"
            whole.write_text(json.dumps(at))
            whole.replace(self._folder / RESTORED)

    def ended(self) -> None:
        """Announce that the latest save is complete, if this run ends with it."""
        if self._over and self._rank == 0:
            (self._folder / SAVED).touch()

    def look(self) -> None:
        """Request a save if the run must stop (rank 0)."""
        if not self._asked and self._rank == 0 and (self._folder / STOP).exists():
            self._asked = True
            self._saves.ask(_WHY)

    def agree_on_end(self, steps: int) -> None:
        """Agree with all ranks on whether the due save is the last one.

        Every rank calls it after the same step, because the save is due on all ranks there.
        """
        reply = self._agree(
            "hand over", lambda: {"stop": self._asked}, lambda shown: dict(shown[0])
        )
        if reply["stop"]:
            self._over = True
            self._saves.agreed(steps, save=False, going=self._ranks, why=_WHY)
