"""Who made others wait: against runs whose truth is known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstride.report.analysis.attribution import Blame, blames_of
from evenstride.report.analysis.run_generation import RecordedGeneration, waits_of
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import COMMUNICATION_S, VirtualRun

Speeds = Callable[[int], tuple[float, ...]]


def ran(
    path: Path, speeds: Speeds, steps: int, **options: object
) -> tuple[VirtualRun, RecordedGeneration]:
    run = VirtualRun(path / "trace.jsonl", speeds, **options)  # type: ignore[arg-type]
    run.begin()
    run.run(steps)
    run.end()
    story = RunTimeline(run.writer.path)
    story.read()
    return run, story.generations[0]


def truth(run: VirtualRun, rank: int, rows: slice) -> float:
    """Return the seconds that the others waited for a worker, by its times as they were made."""
    busy_s = np.array(run.busy_s)[rows]
    longest_s = busy_s.max(axis=1)
    his = busy_s[:, rank] == longest_s
    return float((longest_s[:, np.newaxis] - busy_s)[his].sum())


def of(blames: tuple[Blame, ...], rank: int) -> Blame:
    return next(blame for blame in blames if blame.rank == rank)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("policy", ["uniform", "adaptive"])
@pytest.mark.parametrize(("first", "stop", "speed"), [(200, 350, 0.4), (100, 500, 0.7)])
def test_worker_interval_and_seconds_are_the_true_ones(
    tmp_path: Path, noise: float, policy: str, first: int, stop: int, speed: float
) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 1.0, speed if first <= step < stop else 1.0, 1.0)

    run, generation = ran(tmp_path, speeds, 500, workers=4, policy=policy, noise=noise)
    blames = blames_of(generation)
    blame = of(blames, 2)
    true_s = truth(run, 2, slice(0, 500))

    assert blame.caused_s == pytest.approx(true_s, rel=1e-3)
    if policy == "uniform":
        assert blames[0] is blame
        stretch = blame.stretches[0]
        length = stop - first
        assert abs(stretch.first - first) <= max(1, 0.05 * length)
        assert abs(stretch.last - (stop - 1)) <= max(1, 0.05 * length)
        assert stretch.speed == pytest.approx(speed, rel=0.05)
        within_s = truth(run, 2, slice(first, stop))
        assert stretch.caused_s == pytest.approx(within_s, rel=0.05)
        took_s = float(np.array(run.busy_s).max(axis=1).sum()) + 500 * COMMUNICATION_S
        assert blame.part == pytest.approx(true_s / 3 / took_s, rel=0.01)


def test_the_sentence_says_since_when_and_what_happened(tmp_path: Path) -> None:
    _, generation = ran(
        tmp_path, lambda step: (1.0, 1.0, 0.38 if step >= 1840 else 1.0), 2600, policy="uniform"
    )
    text = blames_of(generation)[0].reason

    check_message(text, "worker 2", "42.2 s", "30%", "step 1")


def test_a_worker_that_is_slow_all_the_time_did_not_slow_down(tmp_path: Path) -> None:
    _, generation = ran(tmp_path, lambda _: (1.0, 1.0, 0.5), 200, policy="uniform", noise=0.02)
    text = blames_of(generation)[0].reason

    check_message(text, "worker 2", "100%")


def test_scatter_is_not_regarded_as_slowness(tmp_path: Path) -> None:
    _, generation = ran(tmp_path, lambda _: (1.0,) * 3, 400, policy="uniform", noise=0.2)
    for blame in blames_of(generation):
        check_message(blame.reason)


def test_balanced_workers_are_not_blamed(tmp_path: Path) -> None:
    _, generation = ran(tmp_path, lambda _: (1.0, 0.5, 0.25), 400)
    blames = blames_of(generation)

    assert all(blame.part < 0.05 for blame in blames)


def test_waits_of_all_workers_add_up(tmp_path: Path) -> None:
    _, generation = ran(tmp_path, lambda _: (1.0, 0.7, 0.3), 60, noise=0.05)
    waits = waits_of(generation)

    np.testing.assert_allclose(waits.caused_s.sum(axis=1), waits.waited_s.sum(axis=1))
    np.testing.assert_allclose(waits.communication_s, COMMUNICATION_S, atol=1e-6)
    reported_s = generation.table.wait_s - COMMUNICATION_S
    np.testing.assert_allclose(waits.waited_s, reported_s, atol=1e-6)


def test_a_worker_that_is_usually_the_slowest_is_not_so_by_chance(tmp_path: Path) -> None:
    """By sums over the run both are as slow; others wait for this one in four fifths of it."""

    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 0.8, 0.25 if 400 <= step < 500 else 1.0)

    _, generation = ran(tmp_path, speeds, 500, policy="uniform", noise=0.05)
    text = of(blames_of(generation), 1).reason

    assert "by chance" not in text
    check_message(text)


def test_a_slow_worker_costs_time_once_a_slower_one_recovers(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 0.7, 0.25 if step < 300 else 1.0)

    _, generation = ran(tmp_path, speeds, 500, policy="uniform", noise=0.01)
    text = of(blames_of(generation), 1).reason

    check_message(text)


def reported_of(reason: str) -> list[tuple[float, str]]:
    """Return the seconds of each part of a sentence on several stretches, and where they are."""
    return [
        (float(seconds), where)
        for seconds, where in re.findall(
            r"[:,] ([\d.]+) s ([a-z]+ [a-z]+(?: [\d]+ to [\d]+)?)", reason
        )
    ]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_each_of_several_slow_downs_has_its_own_seconds(tmp_path: Path, noise: float) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 1.0, 0.3 if 100 <= step < 200 else 0.6 if 300 <= step < 400 else 1.0)

    run, generation = ran(tmp_path, speeds, 500, policy="uniform", noise=noise)
    blame = blames_of(generation)[0]
    (one_s, one), (other_s, other), *_ = reported_of(blame.reason)

    check_message(blame.reason, "100", "199")
    assert (one, other) == ("in steps 100 to 199", "in steps 300 to 399")
    assert one_s == pytest.approx(truth(run, 2, slice(100, 200)) / 2, rel=0.05)
    assert other_s == pytest.approx(truth(run, 2, slice(300, 400)) / 2, rel=0.05)


def test_of_many_phases_the_costliest_are_reported_and_the_rest_together(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 1.0, (1.0, 0.5, 0.4)[step // 80 % 3])

    _, generation = ran(tmp_path, speeds, 960, policy="uniform")
    blame = blames_of(generation)[0]
    text = reported_of(blame.reason)

    assert len(text) == 4
    assert text[-1][1] == "at other"
    assert all(where.startswith("in steps") for _, where in text[:-1])
    assert sum(seconds for seconds, _ in text) == pytest.approx(blame.each_s, rel=0.01)


def test_a_slow_worker_is_named_only_for_steps_in_which_no_other_is_slower(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (
            1.0,
            0.5 if 400 <= step < 1200 else 1.0,
            0.4 if 800 <= step < 1600 else 1.0,
        )

    run, generation = ran(tmp_path, speeds, 2000, policy="uniform", noise=0.03)
    blame = of(blames_of(generation), 1)
    stretch = blame.stretches[0]

    assert stretch.first == pytest.approx(400, abs=10)
    assert stretch.last == pytest.approx(799, abs=10)
    assert stretch.caused_s == pytest.approx(truth(run, 1, slice(400, 800)), rel=0.05)
    assert "its speed fell to 0.5" in blame.reason


def altered(
    run: VirtualRun, change: Callable[[int, list[dict[str, Any]]], None]
) -> RecordedGeneration:
    """Return a run whose trace was changed: the observations of each exchange."""
    path = run.writer.path
    records = [json.loads(line) for line in path.read_text().splitlines()]
    exchanges = [one["event"] for one in records if one.get("event", {}).get("observations")]
    for number, event in enumerate(exchanges):
        change(number, event["observations"])
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    story = RunTimeline(path)
    story.read()
    return story.generations[0]


def test_waiting_for_data_is_given_as_the_reason(tmp_path: Path) -> None:
    run, _ = ran(tmp_path, lambda _: (1.0, 0.5), 60, workers=2, policy="uniform")

    def waiting(_: int, observations: list[dict[str, Any]]) -> None:
        for one in observations:
            one["data_s"] = (0.0, 0.8)[one["worker"]] * sum(one["busy_s"])

    text = blames_of(altered(run, waiting))[0].reason
    check_message(text, "80%")


def test_a_slow_down_that_explains_little_is_not_the_whole_reason(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 0.2 if step >= 100 else 0.25)

    _, generation = ran(tmp_path, speeds, 200, workers=2, policy="uniform")
    text = blames_of(generation)[0].reason

    check_message(text, "step 100", "400%", "0.80")


def test_steps_that_tell_nothing_of_speed_count_where_they_lie(tmp_path: Path) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 0.3 if step >= 100 else 0.6)

    run, _ = ran(tmp_path, speeds, 200, workers=2, policy="uniform")

    def withheld(_: int, observations: list[dict[str, Any]]) -> None:
        for one in observations:
            one["modelled"] = not 80 <= one["first_step"] < 120

    blame = blames_of(altered(run, withheld))[0]

    assert len(blame.stretches) == 2
    assert sum(one.caused_s for one in blame.stretches) == pytest.approx(blame.caused_s)


def test_steps_that_not_all_have_reported_do_not_count(tmp_path: Path) -> None:
    run, whole = ran(tmp_path, lambda _: (1.0, 0.5), 60, workers=2, policy="uniform")

    def silent(number: int, observations: list[dict[str, Any]]) -> None:
        if number == 3:
            del observations[0]

    cut = altered(run, silent)
    assert 0 < np.count_nonzero(~cut.table.whole) < 30
    check_message(blames_of(cut)[0].reason, "100%")
    assert blames_of(cut)[0].caused_s < blames_of(whole)[0].caused_s


def test_a_run_of_which_no_step_tells_of_speed_has_its_culprit(tmp_path: Path) -> None:
    """As where each pass has one step, which is the first."""
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.3), workers=2, policy="uniform")
    run.begin()
    run.run(20)
    path = run.writer.path
    path.write_text(path.read_text().replace('"modelled":true', '"modelled":false'))
    story = RunTimeline(path)
    story.read()
    text = blames_of(story.generations[0])[0].reason

    check_message(text, "worker 1", "233%")


def test_no_worker_is_blamed_without_lockstep(tmp_path: Path) -> None:
    _, generation = ran(tmp_path, lambda _: (1.0, 0.3), 60, workers=2, header={"sync": "asp"})

    assert not generation.lockstep
    assert [blame.caused_s for blame in blames_of(generation)] == [0.0, 0.0]
    check_message(blames_of(generation)[0].reason)
