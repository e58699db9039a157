"""Append records to a trace so that a crash at any byte loses at most the last one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evenstride.core.control.events import Event, Instruction
from evenstride.trace.codec import dumps, encode

FORMAT = 1
"""Version of the format; a reader refuses a later one."""


class TraceWriter:
    """One run's trace, written by its leader alone.

    Every record is one line, handed to the kernel in one ``write``, so that it survives the
    death of the process; it is not forced to the disk, which would cost more than it is worth
    in the middle of training. An existing file is continued: what a crash left of its last
    line is closed with a line end, and a new header follows.

    Args:
        path: the file; its folder is made if needed.
        header: facts about the run; ``policy`` (a specification) is needed for a replay.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _ends_mid_line(path):
            os.write(self._file, b"\n")
        self.record("header", format=FORMAT, **header)

    def record(self, kind: str, **values: Any) -> None:
        """Append one record; ``values`` are JSON types. Does nothing after `close`."""
        if self._file >= 0:
            os.write(self._file, (dumps({"kind": kind, **values}) + "\n").encode())

    def event(
        self,
        at_s: float,
        event: Event,
        verdict: Iterable[Instruction],
        committed_at_s: float | None = None,
    ) -> None:
        """Append an event and what the control answered, ``at_s`` seconds into the run.

        Args:
            at_s: when the event was decided on.
            event: what happened.
            verdict: the answer, part by part.
            committed_at_s: when the latest of an exchange's steps was committed; left out if that
                is not known.
        """
        committed = {} if committed_at_s is None else {"committed_at_s": round(committed_at_s, 6)}
        self.record("event", at_s=round(at_s, 6), **committed, event=encode(event))
        self.record("instructions", instructions=[encode(part) for part in verdict])

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _ends_mid_line(path: Path) -> bool:
    size = path.stat().st_size
    if size == 0:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"
