"""Two runs of one script, one after the other, and the second begins while the first still trains.

The processes of the second come up to where their `Checkpointer` is made, and wait there. When all
have come, the first is asked to stop: it saves, as it does for any other reason, and ends. Then the
second restores. So nobody waits while processes start. A folder per run holds empty files:

``ready-0`` ...     of each rank: it has come to its `Checkpointer`
``go``              of whoever has started the run: it may go on
``restored``        of rank 0: where it has gone on, as JSON
``stop``            of whoever has started the run: save, and end
``saved``           of rank 0: that is done

This is how ``evenstride plan --online`` changes workers and batch of a training.
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
_WHY = "training goes on in other processes"

Agree = Callable[[str, Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]


class Handoff:
    """One rank's part in it; ``agree`` lets all ranks know what rank 0 does."""

    def __init__(
        self, folder: Path, saves: SaveSchedule, rank: int, everyone: tuple[int, ...], agree: Agree
    ) -> None:
        self._folder, self._saves, self._agree = folder, saves, agree
        self._rank, self._everyone = rank, everyone
        self._asked = self._over = False

    def wait(self) -> None:
        """Tell that this rank has come, and wait until it may go on."""
        (self._folder / f"{READY}-{self._rank}").touch()
        go = self._folder / GO
        # Without a limit: the run that trains now saves and ends in its own time.
        while not go.exists():
            time.sleep(_POLL_S)

    def went_on(self, **at: Any) -> None:
        """Tell where a checkpoint has been gone on from."""
        if self._rank == 0:
            # Renamed when complete, so that a reader never sees half of the JSON.
            whole = self._folder / f"{RESTORED}.new"
            whole.write_text(json.dumps(at))
            whole.replace(self._folder / RESTORED)

    def ended(self) -> None:
        """Tell that the latest save is done, if this run was to end with it."""
        if self._over and self._rank == 0:
            (self._folder / SAVED).touch()

    def look(self) -> None:
        """Ask for a save if the run is to stop (rank 0)."""
        if not self._asked and self._rank == 0 and (self._folder / STOP).exists():
            self._asked = True
            self._saves.ask(_WHY)

    def agree_on_end(self, steps: int) -> None:
        """Let all ranks learn whether the save that is due is the last.

        Every rank asks after the same step, as a save is due for all of them there.
        """
        said = self._agree("hand over", lambda: {"stop": self._asked}, lambda shown: dict(shown[0]))
        if said["stop"]:
            self._over = True
            self._saves.agreed(steps, save=False, going=self._everyone, why=_WHY)
