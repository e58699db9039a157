"""Blame for waiting where the truth is known exactly: virtual workers, slowed down for a while."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenstride.report.analysis.attribution import Blame, blames_of
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.analysis.speed_phases import phases_of
from tests.unit.report.virtual import VirtualRun

STEPS = 300


def slowed(path: Path, policy: str, rank: int, speed: float, first: int, last: int) -> VirtualRun:
    """Run four workers, of which one is slower in some steps; times scatter by 3 %."""

    def speeds(step: int) -> tuple[float, ...]:
        return tuple(speed if k == rank and first <= step <= last else 1.0 for k in range(4))

    run = VirtualRun(path / "trace.jsonl", speeds, 4, policy, batch=128, noise=0.03)
    run.begin()
    run.run(STEPS)
    return run


def blamed(run: VirtualRun) -> tuple[Blame, ...]:
    story = RunTimeline(run.writer.path)
    story.read()
    return blames_of(story.generations[0])


def caused_s(run: VirtualRun) -> np.ndarray:
    """Return what each worker made all others wait in each step, ``(steps, workers)``."""
    busy_s = np.array(run.busy_s)
    caused = np.zeros_like(busy_s)
    for step, times in enumerate(busy_s):
        caused[step, times.argmax()] = (times.max() - times).sum()
    return caused


@pytest.mark.parametrize(
    ("rank", "speed", "first", "last"),
    [
        (0, 0.5, 100, 199),
        (3, 0.8, 40, 259),
        (2, 0.2, 150, 299),
        (1, 0.4, 0, 149),
        (2, 0.3, 280, 299),
    ],
)
def test_the_worker_the_steps_and_the_seconds_are_those_that_were(
    tmp_path: Path, rank: int, speed: float, first: int, last: int
) -> None:
    run = slowed(tmp_path, "uniform", rank, speed, first, last)
    truth_s = caused_s(run)
    worst, *_ = blamed(run)
    stretch = worst.stretches[0]

    assert worst.rank == rank
    assert abs(stretch.first - first) <= 2
    assert abs(stretch.last - last) <= 2
    assert stretch.speed == pytest.approx(speed, rel=0.05)
    of_stretch_s = truth_s[first : last + 1, rank].sum()
    assert stretch.caused_s == pytest.approx(of_stretch_s, rel=0.05)
    assert worst.caused_s == pytest.approx(truth_s[:, rank].sum(), rel=1e-4)


@pytest.mark.parametrize(("rank", "speed"), [(0, 0.5), (2, 0.2)])
def test_seconds_are_right_for_all_workers_where_shares_follow_the_speeds(
    tmp_path: Path, rank: int, speed: float
) -> None:
    """Waits are short then. Their causes are mostly chance, but they are counted."""
    run = slowed(tmp_path, "adaptive", rank, speed, 100, 199)
    truth_s = caused_s(run).sum(axis=0)
    reported_s = {blame.rank: blame.caused_s for blame in blamed(run)}

    assert [reported_s[k] for k in range(4)] == pytest.approx(truth_s.tolist(), rel=1e-4)
    assert caused_s(run)[100:104, rank].sum() > 0.1


def test_the_stretch_of_a_worker_that_lost_samples_is_still_where_it_was_slow(
    tmp_path: Path,
) -> None:
    run = slowed(tmp_path, "adaptive", 2, 0.25, 100, 199)
    (blame,) = [one for one in blamed(run) if one.rank == 2]
    slow = min(blame.stretches, key=lambda one: one.speed)

    assert slow.speed == pytest.approx(0.25, rel=0.1)
    assert abs(slow.first - 100) <= 2
    assert abs(slow.last - 199) <= 2
    assert run.shares_at(150)[2] < 0.5 * run.shares_at(50)[2]


def test_a_change_that_is_found_twice_is_still_one() -> None:
    """Blocks place a change that is not sharp at two steps, and both are moved to the same one."""
    noise = np.exp(0.04 * np.random.default_rng(1).standard_normal(145))
    speed = np.repeat([1.0, 0.27, 0.21, 0.28, 0.7, 0.95], [20, 2, 27, 10, 26, 60]) * noise

    assert [phase.first for phase in phases_of(speed)] == pytest.approx([0, 20, 49, 59, 85], abs=1)
