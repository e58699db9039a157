"""Read what can be read of a trace, also while it is written, and say what could not.

`read` refuses a trace that is broken, as decisions hang on it. Who only looks is better served with
what is there: a damaged line is passed over, and told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from evenstride.trace.read import foreign_format, longest_record, trace_path

_AT_ONCE = 1 << 24
_LOOKED_AT = 256
_MOST_TOLD = 20


class TraceTail:
    """Hands out the records of a trace that may still be growing, each once.

    Raises:
        TraceError: there is none.
    """

    def __init__(self, run: Path) -> None:
        self.path = trace_path(run)
        self._file: tuple[int, int] | None = None
        self._begin()
        self._anew = 0

    def _begin(self) -> None:
        self._offset, self._line, self._rest = 0, 0, b""
        self._before = b""  # what stands right before the offset
        self._known = False  # whether the records that come are of a version that is read
        self._broken: tuple[int, int] | None = None  # first and last line
        self._told: list[str] = []
        self._headers = 0
        self._most = longest_record(None)
        self._skipped = 0  # bytes read so far of a line that is too long to be a record

    @property
    def restarts(self) -> int:
        """How often the file was replaced, so that all that was read of it is void."""
        return self._anew

    @property
    def unread(self) -> tuple[str, ...]:
        """What could not be read so far, one sentence each."""
        told = [*self._told, *self._of_broken()]
        if unended := self._skipped + len(self._rest):
            told.append(
                f"line {self._line + 1} is not whole: {unended} bytes that are still being "
                "written, or were cut off by a crash"
            )
        if not self._line and not unended:
            told.append("the file is empty: nothing was written yet")
        elif not self._headers:  # which lines are passed over then says nothing
            return (
                "there is no header, so this is no trace of a run, or its first line is gone; name "
                "a run's folder, or the trace.jsonl in it",
            )
        more = len(told) - _MOST_TOLD
        return (*told[:_MOST_TOLD], *([f"and {more} more such places"] if more > 0 else []))

    def records(self) -> list[dict[str, Any]]:
        """Return the records that were written since the last call.

        Returns:
            Some of them if there are many: call again until there are none.

        Cost:
            memory for 16 MiB of the file or its longest record, and its records. A line that is
            longer than any record of the run is skipped, not decoded.

        Raises:
            OSError: the file cannot be read any more.
        """
        found: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            self._look_at(file)
            file.seek(self._offset)
            # There may be none for long: a run of a later version, or one long line.
            while not found and (data := file.read(_AT_ONCE)):
                found = self._of(data)
        return found

    def _of(self, data: bytes) -> list[dict[str, Any]]:
        """Return the records of what comes next in the file."""
        found: list[dict[str, Any]] = []
        self._offset += len(data)
        self._before = (self._before + data[-_LOOKED_AT:])[-_LOOKED_AT:]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line += 1
            if self._too_long(line):
                continue
            record = _parsed(line)
            if record is None:
                self._pass_over(line)
            elif self._of_run(record):
                found.append(record)
        if self._skipped + len(self._rest) >= self._most:
            self._skipped, self._rest = self._skipped + len(self._rest), b""
        return found

    def _too_long(self, line: bytes) -> bool:
        """Return whether a line has more bytes than any record of the run, and report it."""
        size, self._skipped = self._skipped + len(line), 0
        if size >= self._most:
            self._told.append(
                f"line {self._line} has {size / 1e6:.1f} MB, more than any record of this run, and "
                "is skipped"
            )
        return size >= self._most

    def _look_at(self, file: BinaryIO) -> None:
        """Begin anew if it is another file, or no longer goes on from what was read of it."""
        import os

        stat = os.fstat(file.fileno())
        who = stat.st_dev, stat.st_ino
        # A file that is overwritten in place is the same one to the system, and may be longer.
        file.seek(self._offset - len(self._before))
        gone = file.read(len(self._before)) != self._before
        if self._file is not None and (who != self._file or gone):
            self._begin()
            self._anew += 1
        self._file = who

    def _of_run(self, record: dict[str, Any]) -> bool:
        """Return whether a record is one that is understood; headers tell that of what follows."""
        if record["kind"] == "header":
            foreign = foreign_format(record.get("format"))
            self._headers += 1
            self._known = not foreign
            self._most = longest_record(record.get("world_size"))
            self._told += self._of_broken(mended=True)
            self._broken = None
            if foreign:
                self._told.append(f"what follows line {self._line} is not shown: {foreign}")
        elif not self._known and not self._headers:
            self._pass_over(b"?")
            return False
        return self._known

    def _pass_over(self, line: bytes) -> None:
        if not line.strip():  # what a continued run closes a cut line with
            return
        first = self._broken[0] if self._broken else self._line
        if self._broken and self._line != self._broken[1] + 1:
            self._told += self._of_broken()
            first = self._line
        self._broken = first, self._line

    def _of_broken(self, *, mended: bool = False) -> list[str]:
        if self._broken is None:
            return []
        first, last = self._broken
        if first == last and mended and first > 1:
            return [f"line {first} was cut short by a crash; the run went on behind it"]
        lines = f"line {first} is" if first == last else f"lines {first} to {last} are"
        return [f"{lines} no record of a trace, and passed over"]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    held = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return record if held else None
