"""Checkpoints that any number of ranks can go on from, saved while training goes on.

Start with `checkpointer`. `format` is what lies in the folder, `save` and `restore` the two ways.
"""

from __future__ import annotations

from evenstride.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.checkpointer import Checkpointer
from evenstride.runtime.checkpoint.restore.restorer import Restored

__all__ = ["CheckpointDamaged", "CheckpointError", "Checkpointer", "Restored"]
