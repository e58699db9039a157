"""Checkpoints that any number of ranks can go on from, saved while training goes on."""

from __future__ import annotations

from evenstride.runtime.checkpoint.checkpointer import Checkpointer
from evenstride.runtime.checkpoint.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.restoring import Restored

__all__ = ["CheckpointDamaged", "CheckpointError", "Checkpointer", "Restored"]
