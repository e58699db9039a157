"""Errors of checkpoints: those that everybody may see, and one of our own."""

from __future__ import annotations

from evenstride.errors import CheckpointDamaged, CheckpointError

__all__ = ["CheckpointDamaged", "CheckpointError", "ManifestUncertain"]


class ManifestUncertain(CheckpointError):
    """Writing the manifest failed, and it may be in place nevertheless."""
