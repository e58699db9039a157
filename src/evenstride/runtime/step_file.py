"""A file that always holds the leader's step count, for whoever watches from outside."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from evenstride.errors import ConfigError


class StepFile:
    """The file named by ``EVENSTRIDE_PROGRESS``: one little-endian 64-bit number, in place.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"EVENSTRIDE_PROGRESS names {path}, which cannot be written: {error.strerror}"
            ) from None

    def write(self, step: int) -> None:
        """Note the steps committed so far; does nothing after `close`."""
        if self._file >= 0:
            os.pwrite(self._file, struct.pack("<q", step), 0)

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
