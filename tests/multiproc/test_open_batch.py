"""A batch that is chosen where an epoch ends: exact, the same on every rank, part of the state."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstride.core.control.events import EpochEnded, SetBatch
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.testing import RankPool
from evenstride.trace.codec import decode
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from evenstride.trace.run_log import read_course
from tests.multiproc.open_batches import (
    BOUNDS,
    SAMPLES,
    alone_on,
    chosen,
    ended_at_turn,
    left_early,
    looked,
    restored,
)

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks": (2, {}, {}),
    "three ranks, loader processes": (3, {}, {"num_workers": 2}),
    "persistent loader processes": (2, {}, {"num_workers": 1, "persistent_workers": True}),
    "equal shares, no last batch": (3, {"policy": "uniform"}, {"drop_last": True}),
    "parts for an epoch": (2, {}, {"partition": "epoch"}),
    "one process with micro-batches": (1, {}, {"max_micro_batch": 2}),
}


def _steps(everywhere: list[dict[str, Any]]) -> list[list[int]]:
    """Return the samples of each step, of all ranks together."""
    rows = zip(*(mine["seen"] for mine in everywhere), strict=True)
    return [sorted(index for ids in row for index in ids) for row in rows]


def _check_exact(
    everywhere: list[dict[str, Any]],
    steps: list[list[int]],
    *,
    whole: bool = True,
    samples: int = SAMPLES,
) -> None:
    """Compare with one process, and see that each epoch has each sample once."""
    first = everywhere[0]
    batches = [tuple(one) for one in first["batches"]]
    assert all(mine["batches"] == first["batches"] for mine in everywhere)
    assert all(BOUNDS[0] <= batch <= BOUNDS[1] for _, batch in batches)
    assert all(a <= 2 * b <= 4 * a for (_, a), (_, b) in pairwise(batches))
    ends = [0, *(step for _, step, _ in first["ends"])]
    assert {step for step, _ in batches} <= set(ends), "only where an epoch ends"
    for begin, end in pairwise(ends):
        epoch = [index for ids in steps[begin:end] for index in ids]
        assert len(set(epoch)) == len(epoch)
        batch = next(batch for step, batch in reversed(batches) if step <= begin)
        assert [len(ids) for ids in steps[begin : end - 1]] == [batch] * (end - begin - 1)
        assert len(epoch) == samples - (0 if whole else samples % batch)
    for mine in everywhere:
        for ours, plain in zip(mine["weights"], alone_on(steps, samples), strict=True):
            torch.testing.assert_close(
                torch.tensor(ours, dtype=torch.float64),
                torch.tensor(plain, dtype=torch.float64),
                rtol=0,
                atol=1e-9,
            )


@pytest.mark.parametrize("name", CASES)
def test_training_is_exact_through_all_its_batches(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    world_size, settings, options = CASES[name]

    everywhere = ranks.run(chosen, world_size, {**settings, "trace": tmp_path}, options, 6)

    _check_exact(everywhere, _steps(everywhere), whole=not options.get("drop_last"))
    assert len(everywhere[0]["batches"]) > 1, "noise says that a larger batch is worth it"
    last = everywhere[0]["batches"][-1][1]
    assert all(mine["batch"] == mine["summary"] == last for mine in everywhere)
    _check_trace(tmp_path, everywhere[0])


def _check_trace(folder: Path, reported: dict[str, Any]) -> None:
    """The trace tells of each change, replays to the same bytes, and can be read as a run."""
    assert replay(folder).identical
    records = list(read_records(folder))
    events = [decode(one["event"]) for one in records if one["kind"] == "event"]
    assert sum(isinstance(event, EpochEnded) for event in events) == len(reported["ends"])
    sets = [
        decode(plain)
        for one in records
        if one["kind"] == "instructions"
        for plain in one["instructions"]
    ]
    changes = [[one.effective, one.global_batch] for one in sets if isinstance(one, SetBatch)]
    assert [[0, BOUNDS[0]], *changes] == reported["batches"]
    passes = {one["step"]: one["global_batch"] for one in records if one["kind"] == "pass"}
    assert all(passes.get(step, batch) == batch for step, batch in reported["batches"])
    assert set(read_course(folder).batches) == set(passes.values())
    story = RunTimeline(folder)
    story.read()
    assert [one.global_batch for one in story.generations] == [b for _, b in reported["batches"]]
    assert not story.unread


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_the_batch_is_part_of_the_state(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    """Stopped in mid-epoch, it goes on with the batch it had, at another number of workers."""
    first = ranks.run(chosen, before, {}, {}, 9, tmp_path, 23, 12)
    assert first[0]["batches"] == [[0, 12]] and first[0]["step"] == 23

    options = {"max_micro_batch": 2} if after == 1 else {}
    second = ranks.run(chosen, after, {}, options, 4, tmp_path)

    steps = [*_steps(first), *_steps(second)]
    ends = [*first[0]["ends"], *second[0]["ends"]]
    assert second[0]["ends"][0][:2] == (1, 2 * SAMPLES // 12), (
        "the epoch ends with the batch it had"
    )
    _check_exact([{**mine, "ends": ends} for mine in second], steps)


def test_a_loop_that_all_leave_before_its_end_changes_nothing(ranks: RankPool) -> None:
    everywhere = ranks.run(left_early, 2, (0, 1))

    assert everywhere[0]["ends"][0][2] == BOUNDS[0]
    assert everywhere[0]["batches"][1:] == [] or everywhere[0]["batches"][1][0] > 40
    _check_exact(everywhere, _steps(everywhere))


@pytest.mark.parametrize("samples", [12, 18, 30, 240])
@pytest.mark.parametrize("who", [(0,), (1,)])
def test_no_rank_waits_for_one_that_left_the_loop_after_its_last_step(
    ranks: RankPool, who: tuple[int, ...], samples: int
) -> None:
    """Also where that was one of the steps that each wait for a decision."""
    everywhere = ranks.run(left_early, 2, who, samples)

    assert everywhere[0]["ends"][0] == everywhere[1]["ends"][0]
    assert everywhere[0]["ends"][0][2] == BOUNDS[0], "the batch of before is kept"
    _check_exact(everywhere, _steps(everywhere), samples=samples)


def test_reading_the_data_on_one_rank_does_not_affect_others(ranks: RankPool) -> None:
    assert ranks.run(looked, 2) == ["trained"] * 2


def test_a_state_of_another_batch_is_taken_up_by_all(ranks: RankPool) -> None:
    assert ranks.run(restored, 2) == [f"an epoch of {SAMPLES // 24} steps"] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_no_rank_waits_for_one_that_ends_at_a_change_of_the_batch(
    ranks: RankPool, who: int
) -> None:
    reported = ranks.run(ended_at_turn, 2, who)

    assert reported[who] == "left"
    assert reported[1 - who] == f"goes on with {BOUNDS[0]}"


def test_learning_rates_can_follow_the_batch_of_the_epoch(ranks: RankPool) -> None:
    """As soon as a loop has ended, the batch of the next one is known, on every rank."""
    everywhere = ranks.run(chosen, 2, {}, {}, 5)

    known = [batch for _, _, batch in everywhere[0]["ends"]]
    steps = _steps(everywhere)
    ends = [step for _, step, _ in everywhere[0]["ends"]]
    assert [len(steps[end]) for end in ends[:-1]] == known[:-1]
    by_rank = defaultdict(set)
    for mine in everywhere:
        for epoch, _, batch in mine["ends"]:
            by_rank[epoch].add(batch)
    assert all(len(batches) == 1 for batches in by_rank.values())
