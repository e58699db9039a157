"""What the leader decided and learnt, as moments on tracks of its own."""

from __future__ import annotations

from typing import Any

from evenstride.core.fleet import Shares
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.perfetto.event_writer import EventFile
from evenstride.report.perfetto.track_groups import LeaderTracks
from evenstride.report.perfetto.world_clock import Placed

_SHOWN_SHARES = 8
Window = tuple[int, int]
"""Nanoseconds since the base, first and last."""


def write_decisions(file: EventFile, tracks: LeaderTracks, placed: Placed, window: Window) -> None:
    """Write decisions and incidents of a generation that fell into a window of time."""
    for one in placed.generation.decisions:
        at_ns = placed.at_ns(one.at_s)
        if window[0] <= at_ns <= window[1]:
            name = "kept" if one.shares is None else f"shares {_shown(one.shares)}"
            args: dict[str, Any] = {"from step": one.step, "reason": one.reason}
            if one.shares is not None:
                args["shares"] = list(one.shares)
            file.instant(tracks.decisions, name, at_ns, args)
    for incident in placed.generation.incidents:
        at_ns = placed.at_ns(incident.at_s)
        if window[0] <= at_ns <= window[1]:
            file.instant(tracks.incidents, incident.text, at_ns, {"step": incident.step})


def write_notes(
    file: EventFile, tracks: LeaderTracks, life: LeaderProcess, placed: Placed, window: Window
) -> None:
    """Write what a process noted beside its decisions, such as alerts."""
    for note in life.notes:
        at_s = note.get("at_s")
        if not isinstance(at_s, int | float) or not at_s >= 0:
            continue
        at_ns = placed.at_ns(at_s)
        if window[0] <= at_ns <= window[1]:
            rest = {key: one for key, one in note.items() if key not in ("kind", "at_s")}
            file.instant(tracks.notes, _title(note), at_ns, rest)


def _title(note: dict[str, Any]) -> str:
    """Return the kind of a note, and whom it is about."""
    kind, worker = str(note["kind"]), note.get("worker")
    return f"{kind}: {worker}" if isinstance(worker, str) else kind


def _shown(shares: Shares) -> str:
    text = "/".join(map(str, shares[:_SHOWN_SHARES]))
    return f"{text}/..." if len(shares) > _SHOWN_SHARES else text
