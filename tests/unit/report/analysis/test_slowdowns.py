"""Workers that slow down without making others wait, in runs whose truth is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstride.report.analysis.attribution import Slowdown, Study, slowed_of
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import VirtualRun

Speeds = Callable[[int], tuple[float, ...]]
STEPS = 400


def slowed(
    path: Path, speeds: Speeds, policy: str = "adaptive:opening_steps=8"
) -> tuple[Slowdown, ...]:
    run = VirtualRun(path / "trace.jsonl", speeds, policy=policy, noise=0.01)
    run.begin()
    run.run(STEPS)
    story = RunTimeline(run.writer.path)
    story.read()
    return slowed_of(Study(story.generations[0]), range(3))


def test_a_slow_worker_with_fewer_samples_is_reported_with_speed_and_share(
    tmp_path: Path,
) -> None:
    (only,) = slowed(tmp_path, lambda step: (1.0, 1.0, 0.4 if step >= 150 else 1.0))

    assert only.rank == 2
    assert only.lost == pytest.approx(0.6 * 250, rel=0.03)
    check_message(only.text, "0.40", "step 150")


def test_a_worker_that_others_waited_for_is_not_reported_twice(tmp_path: Path) -> None:
    assert slowed(tmp_path, lambda s: (1.0, 1.0, 0.4 if s >= 150 else 1.0), "uniform") == ()


@pytest.mark.parametrize(
    ("speed", "steps", "output"),
    [(0.85, 150, True), (0.93, 150, False), (0.5, 40, True), (0.5, 16, False)],
)
def test_little_and_short_slowness_is_left_out(
    tmp_path: Path, speed: float, steps: int, output: bool
) -> None:
    found = slowed(tmp_path, lambda s: (1.0, 1.0, speed if 200 <= s < 200 + steps else 1.0))

    assert [one.rank for one in found] == [2] * output
    assert all(f"in steps 200 to {199 + steps}" in one.text for one in found)


def test_the_worker_that_lost_most_comes_first_and_many_phases_are_combined(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        often = (0.8, 0.5, 0.8, 0.6, 1.0)[step // 80]
        return (0.7 if step >= 300 else 1.0, often, 1.0)

    # With this policy, the others wait little enough for worker 1 that it is not blamed instead.
    found = slowed(tmp_path, speeds, "lb-bsp-cpu")

    assert [one.rank for one in found] == [1, 0]
    output = r"ran below its best speed in 4 phases, at (0\.49|0\.50) of it at the slowest"
    assert re.fullmatch(output, found[0].text), found[0].text


def test_only_requested_workers_are_reported(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda s: (1.0, 1.0, 0.4 if s >= 50 else 1.0))
    run.begin()
    run.run(200)
    story = RunTimeline(run.writer.path)
    story.read()

    assert slowed_of(Study(story.generations[0]), range(2)) == ()
