"""Who has a group of tracks in the trace, and what the tracks are numbered."""

from __future__ import annotations

from typing import NamedTuple

from evenstride.report.perfetto.event_writer import EventFile, ThreadTrack

_TRACKS = 4  # of a group at most
_ROOM = 1000  # for exports between the groups of two ranks
_FOREIGN = 1 << 20


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
        self._pids = self._foreign = self._arrows = 0
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

    def foreign_track(self) -> int:
        """Return the number of a track of another trace."""
        self._foreign += 1
        return _FOREIGN + self._foreign

    def foreign_arrow(self) -> int:
        """Return the number of an arrow, or another thing with an id, of another trace."""
        self._arrows += 1
        return self._arrows

    def _open(self, name: str, order: int) -> int:
        self._pids += 1
        self._file.group(self._pids, name, order)
        return self._pids

    def _tracks(self, pid: int, *names: str) -> list[ThreadTrack]:
        tracks = [ThreadTrack(pid, pid * _TRACKS + number) for number in range(len(names))]
        for track, name in zip(tracks, names, strict=True):
            self._file.track(track, name)
        return tracks
