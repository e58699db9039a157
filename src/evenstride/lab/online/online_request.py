"""What a search is asked for, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstride.lab.limits.speeds import Speeds
from evenstride.lab.online.search_journal import SearchJournal
from evenstride.planner.search.objective import Objective
from evenstride.planner.tuning.online_forecast import OnlineForecast, Probe
from evenstride.planner.tuning.online_policy import Overhead

CHECKPOINTS = "checkpoints"
"""In the folder of a run: where its checkpoints are."""


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """What is searched for.

    Args:
        command: script and arguments.
        workers: numbers of them to choose from.
        batches: global batches to choose from; empty for the script's own.
        epochs: that training lasts at the smallest batch.
        objective: time, cost or the knee of both.
        usd_per_h: price of a worker.
        speeds: of the workers; empty to run them as they are.
        folder: of the run.
        probe_steps: steps of each worker by which a configuration is measured.
        restore: whether training starts from the newest checkpoint in the script's own folder.
    """

    command: tuple[str, ...]
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    epochs: float
    objective: Objective
    usd_per_h: float
    speeds: Speeds
    folder: Path
    probe_steps: int = 40
    restore: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return what another search must share to go on with this one, as JSON types."""
        return {
            "script": list(self.command),
            "workers": sorted(set(self.workers)),
            "batches": sorted(set(self.batches)),
            "epochs": self.epochs,
            "objective": str(self.objective),
            "price": self.usd_per_h,
            "speeds": list(self.speeds),
            "restore": self.restore,
        }


@dataclass(frozen=True, slots=True)
class OnlineResult:
    """What a search came to.

    Args:
        journal: of the search.
        foreseen: all configurations as they looked when the choice was made, the best first.
        after: what the chosen configuration was measured to take after the switch; ``None`` if
            training ended before.
        overhead: what the search has cost; ``None`` if nothing was chosen, or it was continued.
        total_s: of training since the search was last started, from the first step on.
        continued: whether it was begun before, and ended in between.
    """

    journal: SearchJournal
    foreseen: tuple[OnlineForecast, ...]
    after: Probe | None
    overhead: Overhead | None
    total_s: float
    continued: bool = False
