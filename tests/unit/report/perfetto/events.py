"""Reads files of trace events as strictly as the format asks for, and asks questions of them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Event = dict[str, Any]
FOREIGN = 1 << 20
"""Tracks of other traces begin here; what is on them was written by others."""


def _no_number(text: str) -> float:
    raise AssertionError(f"JSON knows no {text}")


@dataclass(frozen=True)
class Events:
    """A file that was found to be sound."""

    head: dict[str, Any]
    all: tuple[Event, ...]

    @cached_property
    def groups(self) -> dict[str, int]:
        """Numbers of groups by their names, in the order in which they are shown."""
        named = {e["args"]["name"]: e["pid"] for e in self.all if e["name"] == "process_name"}
        order = {
            e["pid"]: e["args"]["sort_index"] for e in self.all if e["name"] == "process_sort_index"
        }
        return dict(sorted(named.items(), key=lambda item: order[item[1]]))

    @cached_property
    def tracks(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Numbers of tracks by the names of group and track."""
        names = {number: name for name, number in self.groups.items()}
        return {
            (names[e["pid"]], e["args"]["name"]): (e["pid"], e["tid"])
            for e in self.all
            if e["name"] == "thread_name"
        }

    def slices(self, group: str, track: str) -> list[Event]:
        """Return the slices of a track, in the order of the file."""
        at = self.tracks[group, track]
        return [e for e in self.all if e["ph"] == "X" and (e["pid"], e["tid"]) == at]

    def instants(self, group: str, track: str) -> list[Event]:
        """Return the moments of a track, in the order of the file."""
        at = self.tracks[group, track]
        return [e for e in self.all if e["ph"] == "i" and (e["pid"], e["tid"]) == at]

    def counter(self, group: str, name: str) -> list[tuple[float, float]]:
        """Return the moments (microseconds) and values of a counter."""
        return [
            (e["ts"], e["args"]["value"])
            for e in self.all
            if e["ph"] == "C" and (e["pid"], e["name"]) == (self.groups[group], name)
        ]

    def lasted_s(self, group: str, track: str, name: str) -> float:
        """Return how long all slices of a name lasted together."""
        return float(sum(e["dur"] for e in self.slices(group, track) if e["name"] == name)) / 1e6


def read_events(path: Path) -> Events:
    """Return a file of events, having checked it.

    It is one JSON object. Every event has the fields of its kind, and times are not negative. The
    slices of each track of ours are in order and are nested or disjoint. Every group and track has
    a name, and no track is part of two groups.
    """
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    head = json.loads(text, parse_constant=_no_number)
    events = Events(
        {k: v for k, v in head.items() if k != "traceEvents"}, tuple(head["traceEvents"])
    )
    for event in events.all:
        _check(event)
    _check_slices(events)
    _check_names(events)
    return events


def _check(event: Event) -> None:
    assert isinstance(event["name"], str), event
    assert event["name"].isprintable(), event
    assert isinstance(event["pid"], int), event
    assert event["pid"] > 0, event
    match event["ph"]:
        case "M":
            assert isinstance(event["args"], dict), event
        case "X":
            assert event["ts"] >= 0 and event["dur"] >= 0, event
        case "C":
            assert event["ts"] >= 0 and event["args"], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        case "i":
            assert event["ts"] >= 0 and event["s"] in ("g", "p", "t"), event
        case "s" | "t" | "f" | "b" | "e":
            assert event["ts"] >= 0 and isinstance(event["id"], int), event
        case other:
            raise AssertionError(f"an event of kind {other}: {event}")


def _check_slices(events: Events) -> None:
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    latest: dict[tuple[int, int], int] = {}
    for event in events.all:
        if event["ph"] != "X" or event["tid"] >= FOREIGN:
            continue
        track = event["pid"], event["tid"]
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        assert begin >= latest.get(track, begin), f"not in order: {event}"
        latest[track] = begin
        ends = open_until[track]
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], f"across the end of another: {event}"
        ends.append(end)


def _check_names(events: Events) -> None:
    named = [e for e in events.all if e["name"] == "process_name"]
    assert len(named) == len({e["pid"] for e in named}) == len(events.groups)
    assert {e["pid"] for e in events.all} == {e["pid"] for e in named}
    of: dict[int, int] = {}
    for event in events.all:
        if event["ph"] in "Xi":
            assert of.setdefault(event["tid"], event["pid"]) == event["pid"], event
