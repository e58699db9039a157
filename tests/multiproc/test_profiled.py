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


def _paused_us(marks: list[Event], off_us: np.ndarray, bounds: list[int]) -> np.ndarray:
    """Return for each step what the machine paused between the steps of its exchange.

    A trace has the sum of these pauses, and not between which steps they were. A pause may also
    lie between the commit of the exchange's last step and the end of its mark.
    """
    gaps_us = np.array([one["ts"] for one in marks[1:]]) - _ends_us(marks)[:-1]
    pauses_us = np.append(0.0, np.maximum(gaps_us - np.median(gaps_us), 0.0))
    pauses_us = pauses_us[: len(off_us)]
    exchange = np.searchsorted(bounds, np.arange(len(off_us)), side="right")
    last = np.append(np.flatnonzero(np.diff(exchange)), len(exchange) - 1)
    usual_us = float(np.median(np.diff(_ends_us(marks))))
    late_us = np.minimum(off_us[last], 0.3 * usual_us)[exchange - exchange[0]]
    return np.asarray(np.bincount(exchange, pauses_us)[exchange] + late_us)


@pytest.mark.alone
def test_steps_end_where_the_profiler_saw_them_end(events: Events, tmp_path: Path) -> None:
    """Half of them within 15 % of a step, nine of ten within half a step; pauses apart."""
    bounds = [record["event"]["step"] for record in _exchanges(tmp_path)]
    for rank in range(2):
        (own,) = [g for g in events.groups if g.startswith(f"worker {rank} (")]
        (foreign,) = [
            g for g in events.groups if g.startswith(f"worker {rank}: torch.profiler pyt")
        ]
        steps = events.slices(own, "step")
        marks = [
            one
            for one in events.all
            if one["ph"] == "X" and one["name"] == MARK and one["pid"] == events.groups[foreign]
        ]
        marks.sort(key=lambda one: one["ts"])
        assert TOLD <= len(steps) <= len(marks)  # the last are in no exchange
        part = slice(OPENING, len(steps))
        off_us = np.abs(_ends_us(steps) - _ends_us(marks)[: len(steps)])
        off_us = np.maximum(off_us - _paused_us(marks, off_us, bounds), 0.0)[part]
        usual_us = float(np.median(np.diff(_ends_us(marks))))

        assert np.median(off_us) < 0.15 * usual_us
        assert np.percentile(off_us, 90) < 0.5 * usual_us
        inside = [
            min(s["ts"] + s["dur"], m["ts"] + m["dur"]) - max(s["ts"], m["ts"])
            for s, m in zip(steps[part], marks[part], strict=False)
        ]
        lasted_us = np.array([m["dur"] for m in marks[part]])
        assert np.median(np.array(inside) / lasted_us) > 0.8
