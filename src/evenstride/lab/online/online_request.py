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
    """What is searched for."""

    command: tuple[str, ...]  # script and arguments
    workers: tuple[int, ...]  # numbers of them to choose from
    batches: tuple[int, ...]  # global batches to choose from; empty for the script's own
    epochs: float  # that training lasts at the smallest batch
    objective: Objective  # time, cost or the knee of both
    usd_per_h: float  # price of a worker
    speeds: Speeds  # of the workers; empty to run them as they are
    folder: Path  # of the run
    probe_steps: int = 40  # steps of each worker by which a configuration is measured
    # Whether training starts from the newest checkpoint in the script's own folder.
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
    """What a search came to."""

    journal: SearchJournal  # of the search
    # All configurations as they looked when the choice was made, the best first.
    foreseen: tuple[OnlineForecast, ...]
    # What the chosen configuration was measured to take after the switch; ``None`` if training
    # ended before.
    after: Probe | None
    # What the search has cost; ``None`` if nothing was chosen, or it was continued.
    overhead: Overhead | None
    total_s: float  # of training since the search was last started, from the first step on
    continued: bool = False  # whether it was begun before, and ended in between
