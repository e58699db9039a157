"""Merge exports of ``torch.profiler`` into a run: on its clock, with renumbered tracks."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.report.perfetto.event_writer import EventFile, Groups, clean
from evenstride.report.wording import duration, plain

_RANK = re.compile(r"rank[-_ .=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_GIVEN = re.compile(r"(\d{1,6})=(.+)", re.DOTALL)
_RENAMED = ("process_name", "process_sort_index", "process_labels")
_MOST_RANK = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class TorchProfile:
    """An export of one rank."""

    path: Path
    rank: int
    base_ns: int  # time from which its times count, in nanoseconds since 1970
    events: list[dict[str, Any]]  # unchanged


@dataclass(frozen=True, slots=True)
class Merged:
    """Summary of a merged export."""

    path: Path
    rank: int
    events: int
    began_ns: int | None
    ended_ns: int | None


def read_profile(given: str) -> TorchProfile:
    """Return an export, given its file, or ``RANK=FILE`` for a file without a rank.

    Raises:
        ConfigError: The file does not exist, is not a trace, or has no known rank.
    """
    path, rank = _parted(given)
    loaded = _loaded(path)
    facts = loaded if isinstance(loaded, dict) else {}
    events = facts.get("traceEvents") if isinstance(loaded, dict) else loaded
    if not isinstance(events, list):
        raise ConfigError(
            f"{plain(path)} has no trace events: expected a file that export_chrome_trace() of "
            "torch.profiler wrote"
        )
    rank = _rank_of(facts, path) if rank is None else rank
    base = facts.get("baseTimeNanoseconds")
    base_ns = base if isinstance(base, int) and 0 <= base < 1 << 62 else 0
    return TorchProfile(path, rank, base_ns, [one for one in events if _sound(one)])


def write_profile(file: EventFile, groups: Groups, profile: TorchProfile, base_ns: int) -> Merged:
    """Write an export's events. Its groups follow the tracks of its rank."""
    numbers = _Numbers(groups, profile)
    shift_us = (profile.base_ns - base_ns) / 1000
    count, first_us, last_us = 0, float("inf"), float("-inf")
    for event in profile.events:
        if event["ph"] == "M" and event.get("name") in _RENAMED:
            continue
        moved = numbers.of(event)
        at_us = event.get("ts")
        if isinstance(at_us, int | float):
            moved["ts"] = at_us + shift_us if shift_us else at_us
            if event["ph"] == "X":
                lasted_us = event.get("dur")
                lasted_us = lasted_us if isinstance(lasted_us, int | float) else 0.0
                first_us = min(first_us, moved["ts"])
                last_us = max(last_us, moved["ts"] + lasted_us)
        file.foreign(clean(moved) if event["ph"] == "M" else moved)
        count += 1
    known = isfinite(first_us) and isfinite(last_us)
    began_ns, ended_ns = (round(first_us * 1e3), round(last_us * 1e3)) if known else (None, None)
    return Merged(profile.path, profile.rank, count, began_ns, ended_ns)


def outside_run(merged: Merged, began_ns: int, ended_ns: int) -> str:
    """Return a sentence if an export does not overlap the run; else an empty text."""
    if merged.began_ns is None or merged.ended_ns is None:
        return f"{plain(merged.path)} has no event with a length"
    early_ns, late_ns = began_ns - merged.ended_ns, merged.began_ns - ended_ns
    if max(early_ns, late_ns) <= 0:
        return ""
    where = "before its first step" if early_ns > 0 else "after its last step"
    apart = duration(max(early_ns, late_ns) / 1e9)
    return (
        f"{plain(merged.path)} does not overlap the run: it lies {apart} {where}; it is of another "
        "run, of other steps, or of a machine with another clock"
    )


class _Numbers:
    """Gives an export's groups, tracks and arrows unique numbers."""

    def __init__(self, groups: Groups, profile: TorchProfile) -> None:
        self._pids: dict[Hashable, int] = {}
        self._tids = defaultdict[Hashable, int](groups.foreign_tracks.__next__)
        self._ids = defaultdict[Hashable, int](groups.foreign_ids.__next__)
        facts: dict[Hashable, dict[str, Any]] = {}
        for event in profile.events:
            about = facts.setdefault(_key(event.get("pid")), {})
            args = event.get("args")
            if event["ph"] == "M" and isinstance(args, dict):
                about[str(event.get("name"))] = args
        for place, pid in enumerate(sorted(facts, key=lambda pid: _order(facts[pid]))):
            self._pids[pid] = groups.foreign(profile.rank, _name(pid, facts[pid]), place)

    def of(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event with its numbers replaced."""
        pid, tid = _key(event.get("pid")), _key(event.get("tid"))
        moved = {**event, "pid": self._pids[pid], "tid": self._tids[pid, tid]}
        if "id" in event:
            moved["id"] = self._ids[_key(event["id"])]
        return moved


def _key(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _order(about: dict[str, dict[str, Any]]) -> float:
    index = about.get("process_sort_index", {}).get("sort_index")
    return float(index) if isinstance(index, int | float) and isfinite(index) else 0.0


def _name(pid: Hashable, about: dict[str, dict[str, Any]]) -> str:
    name = about.get("process_name", {}).get("name", "")
    labels = about.get("process_labels", {}).get("labels", "")
    parts = [
        "torch.profiler",
        *(str(part) for part in (name, pid, labels) if part not in ("", None)),
    ]
    return " ".join(dict.fromkeys(parts))


def _parted(given: str) -> tuple[Path, int | None]:
    found = _GIVEN.fullmatch(given)
    if found and not Path(given).exists():
        return Path(found[2]), int(found[1])
    return Path(given), None


def _loaded(path: Path) -> Any:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot read {plain(path)} ({plain(why)}); give a file") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ConfigError(
            f"{plain(path)} is not valid JSON ({plain(error, 80)}); export it again with "
            "torch.profiler's export_chrome_trace()"
        ) from None


def _rank_of(facts: dict[str, Any], path: Path) -> int:
    info = facts.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int) and 0 <= rank <= _MOST_RANK:
        return rank
    found = _RANK.search(path.name)
    if found:
        return int(found[1])
    raise ConfigError(
        f"{plain(path)} has no rank: expected distributedInfo, which torch.profiler writes if the "
        "process group exists before it starts, or a rank in its name, such as "
        "profile.rank0.json; give --with RANK=FILE"
    )


def _sound(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("ph"), str)
