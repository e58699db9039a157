"""A file that always contains the leader's step count, for observers outside the process."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from evenstride.errors import ConfigError

_RECORD = struct.Struct("<q")


class StepFile:
    """The file named by ``_EVENSTRIDE_PROGRESS``: one little-endian 64-bit integer."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"_EVENSTRIDE_PROGRESS is {path}, which cannot be written: {error.strerror}"
            ) from None

    def write(self, step: int) -> None:
        """Write the number of steps committed so far; does nothing after `close`."""
        if self._file >= 0:
            # One write in place, so that a reader never finds the file empty or truncated.
            os.pwrite(self._file, _RECORD.pack(step), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_steps(path: Path) -> int:
    """Return the steps in the file of a process that may still train; 0 before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    # The file is empty when its process has just created it.
    return int(_RECORD.unpack(data)[0]) if len(data) == _RECORD.size else 0
