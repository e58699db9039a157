"""A run's trace as Chrome trace events: one group of tracks for each worker, one for the leader."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.report.analysis.run_timeline import LeaderProcess, RunTimeline, nothing_to_show
from evenstride.report.perfetto.event_writer import EventFile, Groups
from evenstride.report.perfetto.run_events import (
    Placed,
    TimeWindow,
    base_of,
    pieces,
    place,
    write_counters,
    write_decisions,
    write_memory,
    write_notes,
    write_steps,
)
from evenstride.report.perfetto.torch_profiles import (
    Merged,
    TorchProfile,
    outside_run,
    read_profile,
    write_profile,
)
from evenstride.report.wording import plain

_BEGINNING = 4096  # bytes of a file, by which an export is recognised
_EVER = TimeWindow(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of steps, as their processes count them."""

    first: int = 0
    last: int | None = None  # exclusive; ``None`` for the end of the run

    @property
    def all(self) -> bool:
        """Whether these are all steps."""
        return self.first <= 0 and self.last is None

    def rows(self, placed: Placed) -> tuple[int, int]:
        """Return the rows of a generation with these steps: the first, and the exclusive end."""
        generation = placed.generation
        first = min(max(self.first - generation.first, 0), generation.steps)
        if self.last is None:
            return first, generation.steps
        return first, max(first, min(self.last - generation.first, generation.steps))


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    path: Path
    events: int
    steps: int
    workers: int
    processes: int
    merged: tuple[Merged, ...]
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        merged = [
            {"file": str(one.path), "rank": one.rank, "events": one.events} for one in self.merged
        ]
        return {
            "file": str(self.path),
            "events": self.events,
            "steps": self.steps,
            "workers": self.workers,
            "processes": self.processes,
            "merged": merged,
            "remarks": list(self.remarks),
        }


def export(
    run: Path, path: Path, profiles: Sequence[str] = (), steps: Steps | None = None
) -> Exported:
    """Write a run as trace events for Perfetto and chrome://tracing.

    The file is compressed if its name ends in ``.gz``. See `read_profile` for profiles.

    Raises:
        TraceError: There is no trace, or it contains no run.
        ConfigError: A profile cannot be read or its rank is not in the run, the run has none of
            the steps, or the file cannot be written.

    Cost:
        About 15 microseconds for each step of each worker. Memory for the run's `RunTimeline` and
        for one profile at a time.
    """
    story = RunTimeline(run)
    story.read()
    if not story.generations:
        raise nothing_to_show(story)
    _check_target(path, story.path, profiles)
    try:
        return _Export(story, steps or Steps()).write(path, profiles)
    except OSError as error:
        raise ConfigError(
            f"cannot write {plain(path)} ({error.strerror}); name a file in an existing folder "
            "with --output"
        ) from error


class _Export:
    def __init__(self, story: RunTimeline, steps: Steps) -> None:
        self._story = story
        self._base_ns = base_of(story.lives)
        self._placed, self._notes = place(story.lives, self._base_ns)
        self._spans = [steps.rows(one) for one in self._placed]
        self._whole = steps.all
        self.steps = sum(last - first for first, last in self._spans)
        if not steps.all and not self.steps:
            raise ConfigError(_no_such_steps(steps, self._placed))

    def write(self, path: Path, profiles: Sequence[str]) -> Exported:
        facts = {"run": str(self._story.path), "made by": "evenstride trace"}
        with EventFile(path, self._base_ns, facts) as file:
            groups = Groups(file)
            for placed, span in zip(self._placed, self._spans, strict=True):
                if self._whole or span[1] > span[0]:
                    self._write(file, groups, placed, span)
            merged = tuple(
                write_profile(file, groups, self._of_the_run(read_profile(one)), self._base_ns)
                for one in profiles
            )
            workers = groups.workers
        return Exported(
            path=path,
            events=file.events,
            steps=self.steps,
            workers=workers,
            processes=len(self._story.lives),
            merged=merged,
            remarks=(*self._story.unread, *self._notes, *self._outside(merged)),
        )

    def _write(
        self, file: EventFile, groups: Groups, placed: Placed, span: tuple[int, int]
    ) -> None:
        generation = placed.generation
        names = enumerate(generation.workers)
        tracks = [groups.worker(rank, plain(name)) for rank, name in names]
        for rows in pieces(placed, *span):
            for rank, of_worker in enumerate(tracks):
                write_steps(file, of_worker, rank, rows)
        for rank, of_worker in enumerate(tracks):
            write_counters(file, of_worker.pid, rank, placed, span)
        window = self._window(placed, span)
        write_memory(file, [one.pid for one in tracks], placed, window)
        write_decisions(file, groups.leader, placed, window)
        life = self._story.lives[generation.life]
        if life.generations[-1] is generation or not self._whole:
            write_notes(file, groups.leader, life, placed, window)

    def _of_the_run(self, profile: TorchProfile) -> TorchProfile:
        """Return a profile; raise `ConfigError` if its rank is not in the run."""
        ranks = max(map(_ranks, self._story.lives))
        if profile.rank < ranks:
            return profile
        existing = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"
        raise ConfigError(
            f"{plain(profile.path)} is of rank {profile.rank}, but the run has {existing}; give "
            "profiles of this run, or RANK=FILE if the file names a wrong rank"
        )

    def _window(self, placed: Placed, span: tuple[int, int]) -> TimeWindow:
        if self._whole:
            return _EVER
        return TimeWindow(int(placed.begins_ns[span[0]]), int(placed.ends_ns[span[1] - 1]))

    def _outside(self, merged: tuple[Merged, ...]) -> list[str]:
        shown = [one for one in self._placed if len(one.begins_ns)]
        if not shown:
            return []
        ends = int(shown[0].begins_ns[0]), int(shown[-1].ends_ns[-1])
        return [note for one in merged if (note := outside_run(one, *ends))]


def _ranks(life: LeaderProcess) -> int:
    """Return the number of ranks in a process's run; a worker may be several sharding ranks."""
    size = life.header.get("world_size")
    workers = max((len(one.workers) for one in life.generations), default=0)
    return max(workers, size if isinstance(size, int) else 0)


def _check_target(path: Path, trace: Path, profiles: Sequence[str]) -> None:
    """Raise `ConfigError` if the target is an input or a file of another kind."""
    read = [trace, *(Path(one.partition("=")[2] or one) for one in profiles), *map(Path, profiles)]
    if any(path.resolve() == one.resolve() for one in read):
        raise ConfigError(f"{plain(path)} is an input; name another file with --output")
    if path.is_dir():
        raise ConfigError(f"{plain(path)} is a folder; name a file with --output")
    if path.exists() and not _ours(path):
        raise ConfigError(
            f"{plain(path)} exists and is not an export of evenstride; remove it, or name another "
            "file with --output"
        )


def _no_such_steps(steps: Steps, placed: list[Placed]) -> str:
    requested = f"{steps.first}:{'' if steps.last is None else steps.last}"
    known = [one.generation for one in placed if one.generation.steps]
    if not known:
        return f"the run has no steps yet, so none in {requested}; leave --steps out"
    first = min(one.first for one in known)
    last = max(one.first + one.steps for one in known)
    return f"the run has no steps in {requested}; its steps are {first}:{last}"


def _ours(path: Path) -> bool:
    """Return whether a file may be overwritten: it is empty or an export of ours."""
    if not path.is_file():
        return False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            begins = file.read(_BEGINNING)
    except (OSError, EOFError):
        return False
    return not begins or b'"traceEvents"' in begins
