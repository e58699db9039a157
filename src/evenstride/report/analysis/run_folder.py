"""Find the runs at a path: a trace file, a run's folder, or a folder that holds several runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evenstride.core.formatting import listed
from evenstride.errors import TraceError
from evenstride.report.wording import plain
from evenstride.trace.read import TRACE_NAME, trace_path

_DEPTH = 2  # levels of folders that are searched below the given one
_CALIBRATION = "calibration-"  # folders of the lab with workers measured alone, which are no runs
_HEADER = re.compile(rb'\s*\{\s*"kind"\s*:\s*"header"')
_MOST_NAMED = 6


def is_trace(path: Path) -> bool:
    """Return whether a file begins with the header of a trace."""
    try:
        with path.open("rb") as file:
            return _HEADER.match(file.read(64)) is not None
    except OSError:
        return False


def traces_at(path: Path) -> list[Path]:
    """Return the trace files of the runs at a path.

    A folder with a run of its own has no other runs. The folders below are searched otherwise.

    Raises:
        TraceError: There is no run at the path.
    """
    if not path.is_dir():
        return [trace_path(path)]
    try:
        found = _traces_below(path, _DEPTH)
        if not found:
            raise TraceError(f"no run at {plain(path)}: {_contents(path)}")
    except OSError as error:
        raise TraceError(f"cannot read {error.filename} ({error.strerror})") from None
    return found


def one_trace_at(path: Path) -> Path:
    """Return the trace file of the only run at a path; raise `TraceError` if there are several."""
    found = traces_at(path)
    if len(found) > 1:
        named = listed(map(plain, found), _MOST_NAMED)
        raise TraceError(f"{plain(path)} holds {len(found)} runs; give one of {named}")
    return found[0]


def _traces_below(folder: Path, depth: int) -> list[Path]:
    if (own := folder / TRACE_NAME).is_file():
        return [own]
    if traces := [path for path in sorted(folder.glob("*.jsonl")) if is_trace(path)]:
        return traces
    if not depth:
        return []
    folders = [one for one in sorted(folder.iterdir()) if one.is_dir()]
    runs = [one for one in folders if not one.name.startswith(_CALIBRATION)]
    return [trace for one in runs for trace in _traces_below(one, depth - 1)]


def _contents(folder: Path) -> str:
    names = [f"{one.name}/" if one.is_dir() else one.name for one in sorted(folder.iterdir())]
    contained = listed(map(plain, names), _MOST_NAMED)
    holds = f"the folder contains {contained}" if names else "the folder is empty"
    return (
        f"{holds}; expected {TRACE_NAME} or folders that have one. A run writes it if "
        "EVENSTRIDE_TRACE or Stride(trace=...) names its folder"
    )


def run_names(traces: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names of runs: their folders, or the names of loose traces."""
    parts = [
        path.resolve().parent.parts
        if path.name == TRACE_NAME
        else (*path.resolve().parent.parts, path.stem)
        for path in traces
    ]
    lengths = range(1, max(map(len, parts)) + 1)
    candidates = [["/".join(one[-length:]) for one in parts] for length in lengths]
    names = max(candidates, key=lambda names: len(set(names)))  # the shortest of the best
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
