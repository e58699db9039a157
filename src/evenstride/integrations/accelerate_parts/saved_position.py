"""The position in the data as a part of Accelerate's saved states."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import PartialState

from evenstride.errors import ConfigError
from evenstride.integrations.accelerate_parts.even_batches import TrainBatches

POSITION = "evenstride.json"
"""File in the folder of a saved state."""


@dataclass
class SavedPosition:
    """Saves and loads the position in the data, in the folder of Accelerate's states."""

    batches: TrainBatches | None = None

    def follow(self, batches: TrainBatches | None) -> None:
        """Take the position of a training loader from now on; of none with ``None``."""
        self.batches = batches

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write the position; on one process per machine, as folders may be local."""
        del models, weights
        if self.batches is None or not PartialState().is_local_main_process:
            return
        path = Path(folder, POSITION)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.batches.stride.state_dict()))
        fresh.replace(path)

    def load(self, models: list[Any], folder: str) -> None:
        """Go to a saved position, before anything else is loaded."""
        del models
        path = Path(folder, POSITION)
        if self.batches is not None and path.exists():
            self.batches.go_to(self._read(path, self.batches.stride.global_batch))

    @staticmethod
    def _read(path: Path, batch: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(path.read_text())
        saved = state.get("global_batch")
        if saved != batch:
            raise ConfigError(
                f"the state in {path.parent} was saved with a global batch of {saved} samples, but "
                f"this run has {batch}; for another number of processes, fix it with "
                f"EvenAccelerator(global_batch={saved})"
            )
        return state
