"""A sink that writes a CSV file with one number per row, so the set of workers may change."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.snapshot import Snapshot

COLUMNS = ("unix_s", "step", "epochs", "metric", "label", "value", "text")
# Spreadsheets treat a cell as a formula if it starts with one of these.
_FORMULAS = ("=", "+", "-", "@")


class CsvSink:
    """Appends rows to a CSV file. Creates the file, its folder and its header if needed.

    If a run crashed while it wrote the file, the incomplete last row is removed.

    Raises:
        ConfigError: ``path`` is a folder, or the file has other columns.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path} is not a regular file; name a file, such as csv:{path / 'metrics.csv'}"
            )
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._begin(path)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: Path) -> None:
        header = _line(COLUMNS)
        size = os.fstat(self._file).st_size
        if not size:
            os.write(self._file, header)
            return
        if os.pread(self._file, len(header), 0) != header:
            raise ConfigError(
                f"{path} has unexpected columns; expected {','.join(COLUMNS)}; name another file, "
                "or move this one"
            )
        os.ftruncate(self._file, _whole_lines(self._file, size))

    def write(self, snapshot: Snapshot) -> None:
        """Append a row for each number, in one write."""
        # One write, so that a crash cuts off at most the last row.
        os.write(self._file, b"".join(_line(row) for row in _rows(snapshot)))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _rows(snapshot: Snapshot) -> Iterator[tuple[object, ...]]:
    at = f"{snapshot.unix_s:.3f}", snapshot.step, _short(snapshot.epochs)
    yield *at, "step", "", snapshot.step, ""
    if snapshot.epochs is not None:
        yield *at, "epochs", "", _short(snapshot.epochs), ""
    for metric, label, value in snapshot.samples:
        if metric != "metric":  # named means follow, each with its own step
            yield *at, metric, _harmless(label), _short(value), ""
    for step, epochs, name, value in snapshot.found:
        yield at[0], step, _short(epochs), "metric", _harmless(name), _short(value), ""
    for alert in snapshot.alerts:
        worker, text = _harmless(alert.worker), f"{alert.kind}: {alert.reason}"
        yield *at, "alert", worker, _short(alert.speed), text


def _line(row: tuple[object, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue().encode()


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


def _harmless(text: str) -> str:
    """Return a text that spreadsheets do not treat as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text


def _whole_lines(file: int, size: int) -> int:
    """Return the number of bytes up to the last line end; the header ends in one."""
    end = size
    while end:
        start = max(end - 4096, 0)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
