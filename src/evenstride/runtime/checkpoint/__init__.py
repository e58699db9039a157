"""Checkpoints that are saved asynchronously and can be restored with any number of ranks.

Start with `checkpointer`. `format` defines the files; `save` writes them, `restore` reads them.
"""

from __future__ import annotations

from evenstride.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.checkpointer import Checkpointer
from evenstride.runtime.checkpoint.restore.restorer import Restored

__all__ = ["CheckpointDamaged", "CheckpointError", "Checkpointer", "Restored"]
