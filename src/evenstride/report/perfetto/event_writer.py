"""Write trace events to a file one by one, and number their tracks.

Source:
    "Trace Event Format", Google; Perfetto reads it as its external format "JSON". Times are in
    microseconds. Slices of one thread must be nested or disjoint.
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

_LEVEL = 3  # of gzip: higher levels take several times as long for 10 % less
_MOST_TEXT = 2000
_TRACKS = 4  # of a group at most
_ROOM = 1000  # for profiles between the groups of two ranks
_FOREIGN = 1 << 20  # first number after the tracks of the run
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ThreadTrack(NamedTuple):
    """A line of slices within a group of lines. The format calls them thread and process."""

    pid: int
    tid: int


class EventFile:
    """A context manager that writes the events of one trace file.

    The file appears when the context ends. After an error, the previous file remains. Times count
    from ``base_ns``, in nanoseconds since 1970.
    """

    def __init__(self, path: Path, base_ns: int, facts: dict[str, Any]) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._file = _opened(self._partial, compressed=path.suffix == ".gz")
        self.events = 0
        head = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,  # as in exports of torch.profiler
            "otherData": clean(facts),
        }
        self._file.write(_encode(head)[:-1] + ',"traceEvents":[')

    def group(self, pid: int, name: str, order: int) -> None:
        """Name a group of tracks."""
        self._named(ThreadTrack(pid, 0), "process_name", {"name": plain(name)})
        self._named(ThreadTrack(pid, 0), "process_sort_index", {"sort_index": order})

    def track(self, track: ThreadTrack, name: str) -> None:
        """Name a track. Tracks with lower numbers are shown above."""
        self._named(track, "thread_name", {"name": plain(name)})
        self._named(track, "thread_sort_index", {"sort_index": track.tid})

    def slice(
        self, track: ThreadTrack, name: str, begin_ns: int, end_ns: int, args: dict[str, Any]
    ) -> None:
        """Write a slice, unless its length is 0.

        The name must have no control characters; see `clean` for the arguments.
        """
        begin_us, end_us = _us(begin_ns), _us(end_ns)
        if end_us <= begin_us:
            return
        more = f',"args":{_encode(args)}' if args else ""
        self._put(
            f'{{"ph":"X","pid":{track.pid},"tid":{track.tid},"ts":{begin_us},'
            f'"dur":{end_us - begin_us},"name":{_quoted(name)}{more}}}'
        )

    def counter(self, pid: int, name: str, at_ns: int, value: float) -> None:
        """Write the value of a counter from a time on. The name contains the unit."""
        self._put(
            f'{{"ph":"C","pid":{pid},"ts":{_us(at_ns)},"name":{_quoted(name)},'
            f'"args":{{"value":{_encode(value)}}}}}'
        )

    def instant(self, track: ThreadTrack, name: str, at_ns: int, args: dict[str, Any]) -> None:
        """Write an event without a length. Name and arguments may be untrusted."""
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
            text = _encode(event)
        except ValueError:  # NaN or infinity
            text = _encode(clean(event))
        self._put(text)

    def _named(self, track: ThreadTrack, what: str, args: dict[str, Any]) -> None:
        event = {"ph": "M", "pid": track.pid, "tid": track.tid, "name": what, "args": args}
        self._put(_encode(event))

    def _put(self, text: str) -> None:
        self._file.write(f",\n{text}" if self.events else f"\n{text}")
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
    """Return a value with valid JSON numbers and texts without control characters."""
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

    Readers use floats, in which adjacent slices with fractions could overlap by rounding.
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
        """Number of the group."""
        return self.step.pid


class LeaderTracks(NamedTuple):
    """The tracks of the leader."""

    decisions: ThreadTrack
    incidents: ThreadTrack
    notes: ThreadTrack


class Groups:
    """Numbers groups and tracks, and names them in the file at their first use.

    A worker is a rank and a name, so a machine that returns as another rank is another worker.
    """

    def __init__(self, file: EventFile) -> None:
        self._file = file
        self._workers: dict[tuple[int, str], WorkerTracks] = {}
        self._pids = 0
        # Numbers of the tracks and ids (such as those of arrows) of other traces.
        self.foreign_tracks = count(_FOREIGN + 1)
        self.foreign_ids = count(1)
        pid = self._open("evenstride: the leader", 0)
        self.leader = LeaderTracks(*self._tracks(pid, "decisions", "incidents", "alerts and notes"))

    @property
    def workers(self) -> int:
        """Number of workers with tracks."""
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
