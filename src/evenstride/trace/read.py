"""Read a trace: whole or truncated, strictly or leniently, also while it grows.

`read_records` rejects a damaged trace, because decisions depend on it. For displays, `TraceTail`
skips a damaged line and reports it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from evenstride.core.gradients.noise_scale import GradientNorms
from evenstride.errors import TraceError

FORMAT = 1
"""Version of the format; a reader rejects later ones."""
TRACE_NAME = "trace.jsonl"
"""Name of the trace file inside a run's folder."""
_MOST_BELOW = 6
# Largest size of a record, and the size that each worker may add to it.
_RECORD_BYTES = 1 << 22
_WORKER_BYTES = 1 << 18
_MOST_WORKERS = 100_000
_BYTES_AT_ONCE = 1 << 24
_BYTES_LOOKED_AT = 256
_MOST_REPORTED = 20


def trace_path(run: Path) -> Path:
    """Return the trace file of a run, given its folder or the file itself.

    Raises:
        TraceError: it does not exist.
    """
    path = run / TRACE_NAME if run.is_dir() else run
    if not path.is_file():
        raise TraceError(f"no trace at {path}; {_instead(run)}")
    return path


def _instead(run: Path) -> str:
    if not run.exists():
        return (
            "there is no such file or folder; give a run's folder or its trace file (a run writes "
            "one when EVENSTRIDE_TRACE or Stride(trace=...) names a path)"
        )
    below = sorted(path.parent for path in run.glob(f"*/{TRACE_NAME}")) if run.is_dir() else []
    if not below:
        return (
            f"{run} exists, but contains no trace; a run writes one when "
            "EVENSTRIDE_TRACE or Stride(trace=...) names the folder"
        )
    more = f" and {len(below) - _MOST_BELOW} more" if len(below) > _MOST_BELOW else ""
    return f"these folders below it have one: {', '.join(map(str, below[:_MOST_BELOW]))}{more}"


def read_records(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in order.

    A line that a crash cut short is skipped: it is either the last line, or followed by
    the header of the run that continued the file.

    Raises:
        TraceError: the file is missing, is not a trace, or has another damaged line.
    """
    path = trace_path(run)
    broken: int | None = None
    most = longest_record(None)
    with path.open("rb") as file:
        for number in count(1):
            if not (line := file.readline(most)):
                break
            if len(line) == most:
                raise _too_long(path, number, most)
            record = _parsed(line) if line.endswith(b"\n") else None
            if record is None:
                if broken is not None:
                    raise _unreadable(path, broken)
                broken = number
                continue
            if record["kind"] == "header":
                if problem := foreign_format(record.get("format")):
                    raise TraceError(f"{path}, line {number}: {problem}")
                most = longest_record(record.get("world_size"))
            elif broken is not None or number == 1:
                raise _unreadable(path, broken or 1)
            broken = None
            yield record
    if broken == 1 and path.stat().st_size > 0 and not _may_be_cut_header(path):
        raise _unreadable(path, 1)


def read_noise(run: Path) -> Iterator[tuple[int, GradientNorms]]:
    """Yield the measured steps of a run, each with the norms of its gradient.

    Steps count from the start of the process that trained them, as in all records. They are in
    the order in which the leader received them. A run without noise measurements yields nothing.

    Raises:
        TraceError: the trace cannot be read, or a noise record lacks a number.
    """
    for record in read_records(run):
        if record["kind"] == "noise":
            yield norms_of(record, run)


def norms_of(record: dict[str, Any], run: Path) -> tuple[int, GradientNorms]:
    """Return the step of a noise record, and the norms of its gradient, or raise `TraceError`."""
    names = [field.name for field in fields(GradientNorms)]
    if not all(isinstance(record.get(name), int | float) for name in ("step", *names)):
        raise TraceError(
            f"a noise record in {run} lacks one of the numbers step, {', '.join(names)}; it "
            "was changed after it was written"
        )
    return record["step"], GradientNorms(**{name: record[name] for name in names})


class DataPass(NamedTuple):
    """The start of a pass over the data."""

    step: int  # its first step, counted from the start of the process
    epochs: float  # trained before it
    samples: int  # of an epoch
    batch: int  # of its steps
    at_s: float | None  # time of its start; ``None`` if the trace does not contain it


def pass_of(record: dict[str, Any], batch: Any, run: Path) -> DataPass:
    """Return a record of a pass; `TraceError` if a number is missing.

    ``batch`` is used if the record has none: older versions never changed it in a run.
    """
    values: list[Any] = [record.get(name) for name in ("step", "epochs", "samples")]
    batch = record.get("global_batch", batch)
    sound = all(map(is_number, values))
    if not sound or not is_number(batch):
        lacking = "global_batch" if sound else "step, epochs, samples"
        raise TraceError(
            f"a pass record in {run} lacks one of {lacking}, or has a non-finite number there; it "
            "was changed after it was written"
        )
    begun_s = record.get("at_s")
    at_s = float(begun_s) if is_number(begun_s) else None
    step, epochs, samples = values
    return DataPass(int(step), float(epochs), int(samples), int(batch), at_s)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number that fits a float."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def longest_record(workers: object) -> int:
    """Return the largest number of bytes of one record, in a run with this number of workers.

    An exchange holds up to 512 steps of each worker, about 130 kB if each of them has another
    share. A longer line is damaged, or was never written by a run; decoding it could take minutes.
    """
    known = workers if isinstance(workers, int) else 1
    return _RECORD_BYTES + min(max(known, 1), _MOST_WORKERS) * _WORKER_BYTES


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # malformed JSON or a truncated code point
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def foreign_format(version: Any) -> str:
    """Return the problem of a trace's format that cannot be read; empty if it can."""
    name = f"trace format {str(version)[:20]!r}"
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        return f"{name} is not written by any version of evenstride; restore the file"
    if version > FORMAT:
        return f"{name} is newer than this version of evenstride (up to {FORMAT}); upgrade it"
    return ""


def _may_be_cut_header(path: Path) -> bool:
    with path.open("rb") as file:
        return not file.read().endswith(b"\n")


def _too_long(path: Path, number: int, most: int) -> TraceError:
    return TraceError(
        f"{path}, line {number} is longer than {most / 1e6:.1f} MB, the limit for a record of this "
        "run; restore the file, or remove that line"
    )


def _unreadable(path: Path, number: int) -> TraceError:
    return TraceError(
        f"{path}, line {number} is not a trace record, but lines follow it; only the last line "
        "of a run may be truncated. Restore the file, or truncate it before that line"
    )


class TraceTail:
    """Reads the records of a trace that may still be growing, each once."""

    def __init__(self, run: Path) -> None:
        self.path = trace_path(run)
        self._file: tuple[int, int] | None = None
        self.restarts = 0  # number of times that the file was replaced
        self._begin()

    def _begin(self) -> None:
        self._offset, self._line, self._rest = 0, 0, b""
        self._before = b""  # bytes right before the offset
        self._known = False  # whether the current records have a readable version
        self._broken: tuple[int, int] | None = None  # first and last line
        self._problems: list[str] = []
        self._headers = 0
        self._most = longest_record(None)
        self._skipped = 0  # bytes read so far of an overlong line

    @property
    def unread(self) -> tuple[str, ...]:
        """What could not be read so far, one sentence each."""
        problems = [*self._problems, *self._of_broken()]
        if unended := self._skipped + len(self._rest):
            problems.append(
                f"line {self._line + 1} is incomplete: {unended} bytes that are still being "
                "written, or were cut off by a crash"
            )
        if not self._line and not unended:
            problems.append("the file is empty: nothing was written yet")
        elif not self._headers:  # which lines are skipped then has no meaning
            return (
                "the header is missing, so this is not a run's trace, or its first line is lost; "
                "give a run's folder, or the trace.jsonl in it",
            )
        more = len(problems) - _MOST_REPORTED
        return (*problems[:_MOST_REPORTED], *([f"and {more} more such places"] if more > 0 else []))

    def records(self) -> list[dict[str, Any]]:
        """Return the records written since the last call; call again until the list is empty.

        Cost:
            Memory for 16 MiB of the file or its longest record, and its records. A line that is
            longer than any record of the run is skipped, not decoded.

        Raises:
            OSError: the file can no longer be read.
        """
        found: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            self._look_at(file)
            file.seek(self._offset)
            # Many bytes may contain no record: a run of a later version, or one long line.
            while not found and (data := file.read(_BYTES_AT_ONCE)):
                found = self._of(data)
        return found

    def _of(self, data: bytes) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self._offset += len(data)
        self._before = (self._before + data[-_BYTES_LOOKED_AT:])[-_BYTES_LOOKED_AT:]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line += 1
            if self._too_long(line):
                continue
            record = _parsed(line)
            if record is None or not isinstance(record["kind"], str):
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
            self._problems.append(
                f"line {self._line} has {size / 1e6:.1f} MB, more than any record of this run, and "
                "is skipped"
            )
        return size >= self._most

    def _look_at(self, file: BinaryIO) -> None:
        """Start again if the file was replaced, or no longer continues what was read of it."""
        stat = os.fstat(file.fileno())
        who = stat.st_dev, stat.st_ino
        # A file that is overwritten in place is the same for the system, and may be longer.
        file.seek(self._offset - len(self._before))
        gone = file.read(len(self._before)) != self._before
        if self._file is not None and (who != self._file or gone):
            self._begin()
            self.restarts += 1
        self._file = who

    def _of_run(self, record: dict[str, Any]) -> bool:
        """Return whether a record is readable; a header decides that for the following ones."""
        if record["kind"] == "header":
            foreign = foreign_format(record.get("format"))
            self._headers += 1
            self._known = not foreign
            self._most = longest_record(record.get("world_size"))
            self._problems += self._of_broken(mended=True)
            self._broken = None
            if foreign:
                self._problems.append(f"the records after line {self._line} are skipped: {foreign}")
        elif not self._known and not self._headers:
            self._pass_over(b"?")
            return False
        return self._known

    def _pass_over(self, line: bytes) -> None:
        if not line.strip():  # a continued run closes a truncated line with it
            return
        first = self._broken[0] if self._broken else self._line
        if self._broken and self._line != self._broken[1] + 1:
            self._problems += self._of_broken()
            first = self._line
        self._broken = first, self._line

    def _of_broken(self, *, mended: bool = False) -> list[str]:
        if self._broken is None:
            return []
        first, last = self._broken
        if first == last and mended and first > 1:
            return [f"line {first} was cut short by a crash; the run continued after it"]
        lines = f"line {first} is" if first == last else f"lines {first} to {last} are"
        return [f"{lines} not a trace record and skipped"]


class LineTail:
    """Reads the complete lines of a file that another process writes; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> list[dict[str, Any]]:
        """Return the JSON objects written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line]
