"""Recordings of real machines: the presence of spot machines, and the load of others.

A recording of spot machines has the number of machines that were up at each tick. It does not say
which machine was preempted; a rule decides (`machines`). `benchmarks/spot_replay.py` computes how
long training on them would have taken. The files are in the folder that EVENSTRIDE_DATA names, by
default in ``../shared/data``.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.reliability.survival_fit import Lives
from evenstride.errors import ScenarioError

_DATA = "../shared/data"
_DAMAGED = (
    AttributeError,
    BadZipFile,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zlib.error,
)
"""Exceptions from a file that is truncated, damaged, or of another kind."""

MOST_UP = 10_000
"""Largest number of machines of a recording at once; each has its own slot at every tick."""


@dataclass(frozen=True, slots=True, eq=False)
class SpotTrace:
    """The number of machines that were up."""

    name: str  # as recorded; the text before the last slash is the group
    gap_s: float  # seconds from one tick to the next
    up: IntArray  # machines at each tick, int64 ``(ticks,)``

    @property
    def group(self) -> str:
        return self.name.rpartition("/")[0]

    def part(self, first: float, last: float) -> SpotTrace:
        """Return the ticks between two fractions of the recording, each 0 to 1."""
        ticks = slice(round(first * len(self.up)), round(last * len(self.up)))
        return SpotTrace(self.name, self.gap_s, self.up[ticks])


@lru_cache
def load_spot_traces() -> tuple[SpotTrace, ...]:
    """Return all recordings, ordered by name, or raise a `ScenarioError`.

    Source:
        github.com/skypilot-org/spot-traces (Wu et al., "Can't Be Late", NSDI 2024), 31 files joined
        into one.
    """
    path = Path(os.environ.get("EVENSTRIDE_DATA") or _DATA) / "traces" / "spot-traces.json.gz"
    try:
        recorded = json.loads(gzip.decompress(path.read_bytes()))
        return tuple(_sound(name, recorded[name]) for name in sorted(recorded))
    except (FileNotFoundError, NotADirectoryError):
        folder = "the folder that holds traces/spot-traces.json.gz"
        problem = f"are missing at {path}: set EVENSTRIDE_DATA to {folder}"
    except _DAMAGED as error:
        why = getattr(error, "strerror", None) or "damaged, or not a recording of machines"
        problem = f"at {path} cannot be read ({why}); download them again"
    raise ScenarioError(f"the spot traces {problem}")


def _sound(name: str, recorded: Any) -> SpotTrace:
    gap_s, up = float(recorded["metadata"]["gap_seconds"]), np.array(recorded["data"])
    sound = up.ndim == 1 and up.size and up.dtype.kind == "i" and up.min() >= 0
    if not (sound and 0.0 < gap_s < inf):
        raise ValueError("the values are not numbers of machines")
    return SpotTrace(name, gap_s, up.astype(np.int64))


def spot_traces(name: str) -> tuple[SpotTrace, ...]:
    """Return the recordings whose name begins or ends with a text."""
    traces = load_spot_traces()
    found = tuple(t for t in traces if t.name.startswith(name) or t.name.endswith(name))
    if not found:
        groups = ", ".join(sorted({trace.group for trace in traces}))
        raise ScenarioError(f"no spot trace is named {name!r}; name one, or a group: {groups}")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Machines:
    """The machines of a recording, one after another in some slots."""

    gap_s: float  # seconds from one tick to the next.
    slot: IntArray  # slot of each machine, int64 ``(n,)``.
    came: IntArray  # first tick at which it was up, ``(n,)``.
    gone: IntArray  # first tick at which it was down again, or the number of ticks, ``(n,)``.
    # The machine in each slot at each tick, ``(ticks, slots)``; -1 for an empty slot.
    who: IntArray

    def lives(self) -> Lives:
        """Return the lifetimes, counted from the first tick of each machine.

        Machines that were up at the first tick are left out, because their age is not known. A
        machine that was up at ``n`` ticks was lost at an age between ``n - 1`` and ``n`` gaps.
        Raises a `ConfigError` if no machine is left.
        """
        fresh = self.came > 0
        seen, lost = (self.gone - self.came)[fresh], self.gone[fresh] < len(self.who)
        ages_s = np.asarray((seen - np.where(lost, 0.5, 1.0)) * self.gap_s, dtype=np.float64)
        return Lives(ages_s, lost, self.gap_s)

    def events(self) -> tuple[tuple[float, int, bool], ...]:
        """Return (time in seconds, machine, whether it came up) of all changes after the start."""
        ends = np.flatnonzero(self.gone < len(self.who))
        new = np.flatnonzero(self.came > 0)
        went = [(float(self.gone[n]) * self.gap_s, int(n), False) for n in ends]
        return tuple(sorted(went + [(float(self.came[n]) * self.gap_s, int(n), True) for n in new]))


def machines(
    traces: Sequence[SpotTrace], leaves: Literal["oldest", "youngest"] = "oldest"
) -> Machines:
    """Return the machines of simultaneous recordings, side by side."""
    for trace in traces:
        if trace.up.max(initial=0) > MOST_UP:
            raise ScenarioError(
                f"{trace.name} has {trace.up.max():,} machines up at once, but the limit is "
                f"{MOST_UP:,}; record those of one type in one place"
            )
    gaps = sorted({trace.gap_s for trace in traces})
    if len(gaps) != 1:
        given = " and ".join(f"{gap:g} s" for gap in gaps) or "no recording at all"
        raise ScenarioError(f"recordings must have the same gap, but have {given}; choose some")
    ticks = min(len(trace.up) for trace in traces)
    lives: list[tuple[int, int, int]] = []
    slots = 0
    for trace in traces:
        found = _lives(trace.up[:ticks], leaves)
        lives += [(slots + slot, first, last) for slot, first, last in found]
        slots += int(trace.up[:ticks].max())
    slot, came, gone = np.array(lives, dtype=np.int64).reshape(-1, 3).T
    who = np.full((ticks, slots), -1, dtype=np.int64)
    for number, (where, first, last) in enumerate(lives):
        who[first:last, where] = number
    return Machines(gaps[0], slot, came, gone, who)


def _lives(up: IntArray, leaves: str) -> list[tuple[int, int, int]]:
    """Return (slot, first tick, tick of the loss) of each machine of a recording."""
    lives: list[tuple[int, int, int]] = []
    here: list[tuple[int, int]] = []  # (first tick, slot), the oldest first
    for tick in np.flatnonzero(np.diff(up, prepend=0)).tolist():
        for _ in range(len(here) - int(up[tick])):
            first, slot = here.pop(0 if leaves == "oldest" else -1)
            lives.append((slot, first, tick))
        free = sorted(set(range(int(up.max()))) - {slot for _, slot in here})
        here += [(tick, slot) for slot in free[: int(up[tick]) - len(here)]]
    return lives + [(slot, first, len(up)) for first, slot in here]


@lru_cache
def load_recording(day: str) -> FloatArray:
    """Return the CPU use of machines in percent, ``(machines, 288)``, every five minutes of a day.

    Source:
        PlanetLab machines, from the CoMon project (Park & Pai 2006), as published with CloudSim
        (Beloglazov & Buyya 2012).
    """
    root = os.environ.get("EVENSTRIDE_DATA") or _DATA
    path = Path(root) / "traces" / "planetlab-cpu.npz"
    try:
        return _percentages(path, f"cpu_{day}")
    except (FileNotFoundError, NotADirectoryError):
        folder = "the folder that holds traces/planetlab-cpu.npz"
        problem = f"is missing at {path}: set EVENSTRIDE_DATA to {folder}"
    except KeyError:
        problem = f"at {path} lacks the day {day}; download it again"
    except _DAMAGED as error:
        why = getattr(error, "strerror", None) or "damaged, or not a .npz file of percentages"
        problem = f"at {path} cannot be read ({why}); download it again"
    raise ScenarioError(f"the CPU-load recording {problem}, or omit the replay event")


def _percentages(path: Path, name: str) -> FloatArray:
    # If numpy opens a damaged file itself, it leaves the file open.
    with path.open("rb") as raw, np.load(raw) as file:
        used = np.asarray(file[name], dtype=np.float64)
    if used.ndim != 2 or not (used.size and used.min() >= 0 and used.max() <= 100):
        raise ValueError("the values are not percentages")
    return used
