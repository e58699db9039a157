"""Trace events on their way into a file, one after the other, and the tracks they are on.

Source:
    "Trace Event Format", Google; Perfetto reads it as its external format "JSON". Times are in
    microseconds. Slices of one thread must lie beside or inside each other.
"""

from __future__ import annotations

import gzip
import json
import math
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from evenstride.report.wording import plain

_LEVEL = 3  # of gzip: higher ones take several times as long for a tenth less
_MOST_TEXT = 2000
_TRACKS = 4  # of a group at most
_ROOM = 1000  # for exports between the groups of two ranks
_FOREIGN = 1 << 20  # behind the tracks of the run
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ThreadTrack(NamedTuple):
    """A thread of a process, as the format calls a line of slices in a group of lines."""

    pid: int
    tid: int


class EventFile:
    """Writes the events of one trace file; a context manager, which keeps none of them.

    The file is there, and whole, once the context is left; if that is by an error, what was there
    before is still there. Times are counted from ``base_ns``, nanoseconds since 1970.
    """

    def __init__(self, path: Path, base_ns: int, facts: dict[str, Any]) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._file = _opened(self._partial, compressed=path.suffix == ".gz")
        self.events = 0
        head = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,  # as the exports of torch.profiler have it
            "otherData": clean(facts),
        }
        self._file.write(_encode(head)[:-1] + ',"traceEvents":[')

    def group(self, pid: int, name: str, order: int) -> None:
        """Name a group of tracks."""
        self._named(ThreadTrack(pid, 0), "process_name", {"name": plain(name)})
        self._named(ThreadTrack(pid, 0), "process_sort_index", {"sort_index": order})

    def track(self, track: ThreadTrack, name: str) -> None:
        """Name a track; those of lower numbers are shown above."""
        self._named(track, "thread_name", {"name": plain(name)})
        self._named(track, "thread_sort_index", {"sort_index": track.tid})

    def slice(
        self, track: ThreadTrack, name: str, begin_ns: int, end_ns: int, args: dict[str, Any]
    ) -> None:
        """Write something that lasted; what lasted no time is left out.

        The name is without control characters, numbers are finite, and texts clean.
        """
        begin_us, end_us = _us(begin_ns), _us(end_ns)
        if end_us <= begin_us:
            return
        told = f',"args":{_encode(args)}' if args else ""
        self._put(
            f'{{"ph":"X","pid":{track.pid},"tid":{track.tid},"ts":{begin_us},'
            f'"dur":{end_us - begin_us},"name":{_quoted(name)}{told}}}'
        )

    def counter(self, pid: int, name: str, at_ns: int, value: float) -> None:
        """Write what something amounts to from a moment on, with its unit in the name."""
        self._put(
            f'{{"ph":"C","pid":{pid},"ts":{_us(at_ns)},"name":{_quoted(name)},'
            f'"args":{{"value":{_encode(value)}}}}}'
        )

    def instant(self, track: ThreadTrack, name: str, at_ns: int, args: dict[str, Any]) -> None:
        """Write something that happened at one moment; name and arguments may hold anything."""
        event = {
            "ph": "i",
            "s": "t",
            "pid": track.pid,
            "tid": track.tid,
            "name": plain(name),
            "args": clean(args),
        }
        self._put(_encode(event)[:-1] + f',"ts":{_us(at_ns)}}}')

    def foreign(self, event: dict[str, Any]) -> None:
        """Write an event of another trace."""
        try:
            told = _encode(event)
        except ValueError:  # numbers that JSON does not know
            told = _encode(clean(event))
        self._put(told)

    def _named(self, track: ThreadTrack, what: str, args: dict[str, Any]) -> None:
        event = {"ph": "M", "pid": track.pid, "tid": track.tid, "name": what, "args": args}
        self._put(_encode(event))

    def _put(self, told: str) -> None:
        self._file.write(f",\n{told}" if self.events else f"\n{told}")
        self.events += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.write("\n]}\n")
            self._file.close()
            if kind is None:
                self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)


def clean(value: Any) -> Any:
    """Return a value as JSON can have it, its texts without control characters."""
    if isinstance(value, dict):
        return {plain(key): clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [clean(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, bool | int | None) else plain(value, _MOST_TEXT)


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=_LEVEL, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _us(time_ns: int) -> int:
    """Return a time in whole microseconds.

    Readers count in floats, where slices that touch could overlap by the last digit of a fraction.
    """
    return (time_ns + 500) // 1000


@lru_cache(maxsize=256)
def _quoted(name: str) -> str:
    return _encode(name)


class WorkerTracks(NamedTuple):
    """The tracks of one worker."""

    step: ThreadTrack
    work: ThreadTrack
    waiting: ThreadTrack

    @property
    def pid(self) -> int:
        """Number of their group."""
        return self.step.pid


class LeaderTracks(NamedTuple):
    """The tracks of the leader."""

    decisions: ThreadTrack
    incidents: ThreadTrack
    notes: ThreadTrack


class Groups:
    """Numbers groups and tracks, and names them in the file when they are first asked for.

    A worker is a rank and a name: a machine that comes back as another rank is told apart.
    """

    def __init__(self, file: EventFile) -> None:
        self._file = file
        self._workers: dict[tuple[int, str], WorkerTracks] = {}
        self._pids = 0
        # Numbers of tracks, and of arrows and other things with an id, of other traces.
        self.foreign_tracks = count(_FOREIGN + 1)
        self.foreign_ids = count(1)
        pid = self._open("evenstride: the leader", 0)
        self.leader = LeaderTracks(*self._tracks(pid, "decisions", "incidents", "alerts and notes"))

    @property
    def workers(self) -> int:
        """How many workers have tracks."""
        return len(self._workers)

    def worker(self, rank: int, name: str) -> WorkerTracks:
        """Return the tracks of a worker."""
        if (rank, name) not in self._workers:
            pid = self._open(f"worker {rank} ({name})", (rank + 1) * _ROOM)
            tracks = WorkerTracks(*self._tracks(pid, "step", "work", "waiting"))
            self._workers[rank, name] = tracks
        return self._workers[rank, name]

    def foreign(self, rank: int, name: str, place: int) -> int:
        """Return the number of a group of another trace."""
        order = (rank + 1) * _ROOM + 1 + min(place, _ROOM - 2)
        return self._open(f"worker {rank}: {name}", order)

    def _open(self, name: str, order: int) -> int:
        self._pids += 1
        self._file.group(self._pids, name, order)
        return self._pids

    def _tracks(self, pid: int, *names: str) -> list[ThreadTrack]:
        tracks = [ThreadTrack(pid, pid * _TRACKS + number) for number in range(len(names))]
        for track, name in zip(tracks, names, strict=True):
            self._file.track(track, name)
        return tracks
