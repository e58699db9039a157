"""Whichever rank ends first, the trace and the summary have the last steps, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evenstride.core.control.events import Exchanged
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.testing import RankPool
from evenstride.trace.codec import decode
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from tests.messages import check_message
from tests.multiproc.ending import (
    LOOPS,
    ended,
    fetched_ahead,
    limited,
    released_at_once,
    released_last,
)

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("steps", [3, 40])
def test_the_last_steps_are_in_trace_and_summary(
    ranks: RankPool, tmp_path: Path, first: int, steps: int
) -> None:
    ranks.run(ended, 3, tmp_path, first, steps)

    records = list(read_records(tmp_path))
    events = [decode(one["event"]) for one in records if one["kind"] == "event"]
    reported = np.zeros((steps, 3), dtype=int)
    for event in events:
        if isinstance(event, Exchanged):
            for seen in event.observations:
                reported[seen.first_step : seen.first_step + seen.steps, seen.worker] += 1
    assert reported[: steps - 1].tolist() == [[1, 1, 1]] * (steps - 1)
    assert reported[-1, first] == 1, "others may still be at the last step, and not wait for them"
    exchanges = [event for event in events if isinstance(event, Exchanged)]
    assert [event.last for event in exchanges] == [False] * (len(exchanges) - 1) + [True]
    assert replay(tmp_path).identical
    story = RunTimeline(tmp_path)
    story.read()
    assert story.ended and story.generations[0].steps == steps
    assert not [line for line in story.unread if "came after the last exchange" in line]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_limit_of_steps_ends_any_loop_on_every_rank(ranks: RankPool, loop: str) -> None:
    """No pass is empty, so that loop variables are bound, and an endless generator ends."""
    reported = ranks.run(limited, 2, loop, "EVENSTRIDE_MAX_STEPS", "6")

    assert reported == [(0, 6), (0, 6)]


def test_a_calibration_ends_an_endless_loop(ranks: RankPool) -> None:
    reported = ranks.run(limited, 1, "generator", "EVENSTRIDE_CALIBRATE", "0.5:0,0.25:0")

    assert reported == [(0, 8)]


@pytest.mark.parametrize("scaled", [False, True])
def test_fetching_ahead_is_refused_with_its_cause(ranks: RankPool, scaled: bool) -> None:
    reported = ranks.run(fetched_ahead, 2, scaled)

    assert reported[0] == reported[1]
    check_message(reported[0], "backward()")


def test_a_model_is_released_after_the_threads_of_its_group_have_worked(ranks: RankPool) -> None:
    """Otherwise torch may wait for a thread, which waits for the interpreter lock, forever."""
    assert ranks.run(released_last, 2) == [True, True]


@pytest.mark.skipif(TORCH < (2, 8), reason="destroys process groups with the interpreter lock")
def test_a_released_model_does_not_deadlock_with_the_threads_of_its_group(ranks: RankPool) -> None:
    """Where the reducer is the last owner, this deadlocks in some of the first ten rounds."""
    ranks.run(released_at_once, 2, 40)
