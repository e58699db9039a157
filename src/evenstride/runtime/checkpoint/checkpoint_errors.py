"""Errors of checkpoints: the public ones, and those that only this package catches."""

from __future__ import annotations

from evenstride.errors import CheckpointDamaged, CheckpointError

__all__ = [
    "NOT_THERE",
    "CheckpointDamaged",
    "CheckpointError",
    "ManifestUncertain",
    "NotAFile",
    "NotWhole",
]


class ManifestUncertain(CheckpointError):
    """Writing the manifest failed, and it may be in place nevertheless."""


class NotWhole(CheckpointDamaged):
    """A checkpoint's manifest is missing, or is not what was written.

    Args:
        message: what is wrong.
        ended: whether the manifest was written to its end, so that it was damaged later. If not,
            the process that saved it may have died in the middle.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        super().__init__(message)
        self.ended = ended


class NotAFile(OSError):
    """A file's name belongs to something else: a folder, a pipe, a device or a symbolic link."""


NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotAFile)
"""Errors of a storage that say that there is no such file. All others may pass."""
