"""Steps of a run with what torch.profiler saw of them, in one file, on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.report.perfetto.chrome_trace import export
from evenstride.testing import RankPool
from evenstride.trace.read import read_records
from tests.multiproc.profiled import MARK, TOLD, profiled
from tests.unit.report.perfetto.events import Event, Events, read_events

OPENING = 4  # steps in which the ranks still meet
UNTOLD = "came after the last exchange"  # as many steps as chance would have it


@pytest.fixture
def events(ranks: RankPool, tmp_path: Path) -> Events:
    ranks.run(profiled, 2, str(tmp_path))
    profiles = [str(tmp_path / f"profile{rank}.json") for rank in range(2)]
    made = export(tmp_path, tmp_path / "out.json.gz", profiles)
    assert [one for one in made.remarks if UNTOLD not in one] == []
    assert all(reported <= at_s for reported, at_s in _commits(tmp_path))
    assert len(_commits(tmp_path)) >= 2
    return read_events(tmp_path / "out.json.gz")


def _exchanges(run: Path) -> list[dict[str, Any]]:
    return [
        record
        for record in read_records(run)
        if record["kind"] == "event" and record["event"]["type"] == "Exchanged"
    ]


def _commits(run: Path) -> list[tuple[float, float]]:
    """Return when exchanges say that their latest step was committed, and when they were held."""
    return [(record["committed_at_s"], record["at_s"]) for record in _exchanges(run)]


def _ends_us(slices: list[Event]) -> np.ndarray:
    return np.array([one["ts"] + one["dur"] for one in slices])


def _unexplained_us(steps: list[Event], bounds: list[int]) -> np.ndarray:
    """Return for each step the time of its exchange, or of the next one, that no step explains.

    A trace has the sum of the pauses between the steps of an exchange, and not where they were. A
    pause may also lie between the commit of an exchange's last step and the end of its mark.
    """
    ends_us, lasted_us = _ends_us(steps), np.array([one["dur"] for one in steps])
    last = np.array([0, *bounds]) - 1
    starts_us = np.append(steps[0]["ts"], ends_us[last[1:]])
    explained_us = np.add.reduceat(lasted_us, last[:-1] + 1)
    own_us = np.diff(starts_us) - explained_us
    both_us = np.maximum(own_us, np.append(own_us[1:], 0.0))
    return np.repeat(both_us, np.diff(last))


@pytest.mark.alone
def test_steps_end_where_the_profiler_saw_them_end(events: Events, tmp_path: Path) -> None:
    """But for the time that no step explains, and what the ranks themselves ended apart."""
    bounds = [record["event"]["step"] for record in _exchanges(tmp_path)]
    marks = [_marks(events, rank) for rank in range(2)]
    apart_us = np.abs(np.subtract(*map(_ends_us, marks)))
    for rank in range(2):
        (own,) = [g for g in events.groups if g.startswith(f"worker {rank} (")]
        steps = events.slices(own, "step")[: bounds[-1]]
        ends_us = _ends_us(marks[rank])
        off_us = np.abs(_ends_us(steps) - ends_us[: len(steps)])
        known_us = _unexplained_us(steps, bounds) + _widest(apart_us, bounds)

        assert TOLD <= len(steps) <= len(marks[rank])  # the last are in no exchange
        usual_us = float(np.median(np.diff(ends_us)))
        assert (off_us - known_us)[OPENING:-1].max() < 0.15 * usual_us


def _widest(apart_us: np.ndarray, bounds: list[int]) -> np.ndarray:
    """Return for each step the largest value of its exchange."""
    starts = [0, *bounds[:-1]]
    return np.repeat(np.maximum.reduceat(apart_us, starts), np.diff([*starts, bounds[-1]]))


def _marks(events: Events, rank: int) -> list[Event]:
    (foreign,) = [g for g in events.groups if g.startswith(f"worker {rank}: torch.profiler pyt")]
    process = events.groups[foreign]
    named = (one for one in events.all if one["ph"] == "X" and one["name"] == MARK)
    return sorted((one for one in named if one["pid"] == process), key=lambda one: one["ts"])
