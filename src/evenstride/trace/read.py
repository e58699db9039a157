"""Read a trace, whole or cut off at any byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from evenstride.core.gradients.noise_scale import GradientNorms
from evenstride.errors import TraceError
from evenstride.trace.write import FORMAT

TRACE_NAME = "trace.jsonl"
"""Name of the trace file inside a run's folder."""
_MOST_BELOW = 6
_RECORD_BYTES, _WORKER_BYTES, _MOST_WORKERS = 1 << 22, 1 << 18, 100_000


def trace_path(run: Path) -> Path:
    """Return the trace file of a run, given its folder or the file itself.

    Raises:
        TraceError: there is none.
    """
    path = run / TRACE_NAME if run.is_dir() else run
    if not path.is_file():
        raise TraceError(f"no trace at {path}; {_instead(run)}")
    return path


def _instead(run: Path) -> str:
    """Return what to do where a run's trace is not."""
    if not run.exists():
        return (
            "there is no such file or folder; name a run's folder or its trace file (a run writes "
            "one when EVENSTRIDE_TRACE or Stride(trace=...) names a path)"
        )
    below = sorted(path.parent for path in run.glob(f"*/{TRACE_NAME}")) if run.is_dir() else []
    if not below:
        return (
            f"{run} is there, but nothing has written a trace into it; a run does when "
            "EVENSTRIDE_TRACE or Stride(trace=...) names the folder"
        )
    more = f" and {len(below) - _MOST_BELOW} more" if len(below) > _MOST_BELOW else ""
    return f"these below it have one: {', '.join(map(str, below[:_MOST_BELOW]))}{more}"


def read_records(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in order.

    A line that a crash cut short is passed over: it is either the last line, or followed by
    the header of the run that continued the file.

    Raises:
        TraceError: there is no such file, it is not a trace, or a line is broken elsewhere.
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
            record = _parse(line)
            if record is None:
                if broken is not None:
                    raise _unreadable(path, broken)
                broken = number
                continue
            if record["kind"] == "header":
                _check_header(path, number, record)
                most = longest_record(record.get("world_size"))
            elif broken is not None or number == 1:
                raise _unreadable(path, broken or 1)
            broken = None
            yield record
    if broken == 1 and path.stat().st_size > 0 and not _may_be_cut_header(path):
        raise _unreadable(path, 1)


def read_noise(run: Path) -> Iterator[tuple[int, GradientNorms]]:
    """Yield the measured steps of a run, each with what its gradient told of its noise.

    Steps are counted from the start of the process that trained them, as in all records; they come
    in the order in which the leader heard of them. A run that did not measure yields nothing.

    Raises:
        TraceError: the trace cannot be read, or a record of noise lacks a number.
    """
    for record in read_records(run):
        if record["kind"] == "noise":
            yield norms_of(record, run)


def norms_of(record: dict[str, Any], run: Path) -> tuple[int, GradientNorms]:
    """Return a record of noise: the step's number, and what its gradient told.

    Args:
        record: of kind ``noise``.
        run: that it is of, for the error.

    Raises:
        TraceError: it lacks a number.
    """
    names = [field.name for field in fields(GradientNorms)]
    if not all(isinstance(record.get(name), int | float) for name in ("step", *names)):
        raise TraceError(
            f"a record of noise in {run} lacks one of the numbers step, {', '.join(names)}; it "
            "was changed after it was written"
        )
    return record["step"], GradientNorms(**{name: record[name] for name in names})


class DataPass(NamedTuple):
    """Where a pass over the data began."""

    step: int  # with which it began, counted from the start of the process
    epochs: float  # trained before it
    samples: int  # of an epoch
    batch: int  # of its steps
    at_s: float | None  # ``None`` where the trace does not tell


def pass_of(record: dict[str, Any], batch: Any, run: Path) -> DataPass:
    """Return a record of a pass.

    Args:
        record: of kind ``pass``.
        batch: that counts where the record has none; older versions changed none in a run.
        run: that it is of, for the error.

    Raises:
        TraceError: it lacks a number.
    """
    told: list[Any] = [record.get(name) for name in ("step", "epochs", "samples")]
    batch = record.get("global_batch", batch)
    sound = all(map(is_number, told))
    if not sound or not is_number(batch):
        lacking = "global_batch" if sound else "step, epochs, samples"
        raise TraceError(
            f"a pass record in {run} lacks one of {lacking}, or has no finite number there; it was "
            "changed after it was written"
        )
    begun_s = record.get("at_s")
    at_s = float(begun_s) if is_number(begun_s) else None
    step, epochs, samples = told
    return DataPass(int(step), float(epochs), int(samples), int(batch), at_s)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number that fits a float."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def longest_record(workers: object) -> int:
    """Return the number of bytes that one record may have, in a run of so many workers.

    An exchange holds up to 512 steps of each worker, some 130 kB if each of them has another share.
    A longer line is damaged, or was never written by a run; to decode it could take minutes.
    """
    known = workers if isinstance(workers, int) else 1
    return _RECORD_BYTES + min(max(known, 1), _MOST_WORKERS) * _WORKER_BYTES


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # malformed JSON or a code point cut in two
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _check_header(path: Path, number: int, record: dict[str, Any]) -> None:
    if told := foreign_format(record.get("format")):
        raise TraceError(f"{path}, line {number}: {told}")


def foreign_format(version: Any) -> str:
    """Return what is to be said of a trace's format that is not read here; else nothing."""
    told = f"trace format {str(version)[:20]!r}"
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        return f"{told}, which no version of evenstride writes; restore the file"
    if version > FORMAT:
        return f"{told}, and this version of evenstride reads up to {FORMAT}; install a later one"
    return ""


def _may_be_cut_header(path: Path) -> bool:
    with path.open("rb") as file:
        return not file.read().endswith(b"\n")


def _too_long(path: Path, number: int, most: int) -> TraceError:
    return TraceError(
        f"{path}, line {number} is longer than {most / 1e6:.1f} MB, the most that a record of this "
        "run can have; restore the file, or remove that line"
    )


def _unreadable(path: Path, number: int) -> TraceError:
    return TraceError(
        f"{path}, line {number} is not a trace record, and lines follow it; only the last line "
        "of a run may be cut short. Restore the file, or cut it off before that line"
    )
