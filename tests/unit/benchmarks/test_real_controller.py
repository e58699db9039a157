"""The benchmark of real workers that change: what it lets happen, and what it concludes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from benchmarks import real_controller
from benchmarks.real_controller import Bursts, Conductor, NoisyNeighbour, cases, judge
from benchmarks.real_controller_ranks import (
    ADAPTIVE,
    ARMS,
    FIXED,
    UNIFORM,
    CaseBlock,
    CaseReport,
    CaseRound,
    RealCase,
    StepWatch,
    best_fixed,
    turn,
)

from evenstride.lab.processes.local_launch import LaunchProgress
from evenstride.trace.read import LineTail

FAST, SLOW = (0.5, 0.5, 0.5), (0.5, 0.5, 0.25)
CURVES = [{10: 0.010, 40: 0.040}] * 3


def case(slow_from: int, steps: int = 100) -> RealCase:
    """Return a case in which the last worker falls to half its speed."""
    return RealCase("some", ((0, FAST), (slow_from, SLOW)), steps, 0.1, 2, 60.0)


def report(*rounds: tuple[float, float], batch: int = 60) -> CaseReport:
    """Return a report of rounds, each with the speed-up of adaptive and a drift.

    The machine is twice as slow in each round as in the one before.
    """
    took_s = {UNIFORM: 1.0, FIXED: 0.5}
    found = [
        CaseRound(
            number,
            drift,
            [
                CaseBlock(arm, length_s, [length_s / 10] * 10, (20, 20, 20), number)
                for arm in ARMS
                for length_s in [2.0**number * took_s.get(arm, 1.0 / speedup)]
            ],
        )
        for number, (speedup, drift) in enumerate(rounds)
    ]
    return CaseReport(batch, (20, 20, 20), CURVES, [], found)


def test_the_best_fixed_split_weighs_each_phase_by_its_steps() -> None:
    assert best_fixed(case(95), CURVES, 60) == (20, 20, 20)
    assert best_fixed(case(10), CURVES, 60) == (24, 24, 12)


def test_speeds_are_told_at_their_steps_and_again_in_each_block(tmp_path: Path) -> None:
    news = LineTail(tmp_path / "news")
    watch = StepWatch(cases()["interference"], tmp_path / "news")
    for _ in range(2):
        watch.begin()
        seen = []
        for step in range(1, 49):
            watch.mark()
            seen += [(step, one["speeds"][2]) for one in news.records()]
        assert seen == [(8, 0.25), (16, 0.5), (24, 0.25), (32, 0.5), (40, 0.25)]


def test_bursts_follow_from_their_seed() -> None:
    times_s = [0.05 * look for look in range(400)]
    first, again, other = (
        [bursts.at(now_s) for now_s in times_s]
        for bursts in (Bursts(1, 2), Bursts(1, 2), Bursts(2, 2))
    )

    assert first == again
    assert first != other
    assert set(first) == {None, 0, 1}
    assert 0.2 < sum(core is not None for core in first) / len(first) < 0.6


def test_a_neighbour_leaves_no_process() -> None:
    before = psutil.Process().children()
    neighbour = NoisyNeighbour(1)
    (burning,) = (one for one in psutil.Process().children() if one not in before)
    neighbour.begin(0, 0.0)
    neighbour.look(5.0)
    neighbour.close()

    assert not burning.is_running()


def test_each_arm_is_as_often_early_in_a_round_as_late() -> None:
    places = dict.fromkeys(ARMS, 0)
    for number in range(6):
        for place, arm in enumerate(turn(number)):
            places[arm] += place
    assert set(places.values()) == {6}


def test_a_disturbed_round_is_counted_and_shown_apart() -> None:
    found = judge(case(50), report((1.2, 0.01), (1.2, 0.05), (0.6, 0.11)))
    ours = found.arms[-1]

    assert (found.rounds, found.disturbed, found.drift) == (3, 1, 0.11)
    assert ours.arm == ADAPTIVE
    assert ours.to_equal.value == pytest.approx(1.2)
    assert ours.to_fixed.value == pytest.approx(0.6)
    assert ours.all_rounds.value == pytest.approx((1.2 * 1.2 * 0.6) ** (1 / 3))
    assert ours.moves == 0.5
    assert not found.harmful
    assert not found.uncertain


def test_harm_is_found_and_what_cannot_be_told_is_not_claimed() -> None:
    harmful = judge(case(50), report((0.90, 0.0), (0.91, 0.0), (0.905, 0.0)))
    wide = judge(case(50), report((0.7, 0.0), (1.2, 0.0), (0.9, 0.0)))
    disturbed = judge(case(50), report((1.2, 0.2), (1.2, 0.2)))

    assert (harmful.harmful, harmful.uncertain) == (True, False)
    assert (wide.harmful, wide.uncertain) == (False, True)
    assert disturbed.uncertain
    assert disturbed.arms[-1].to_equal.value == pytest.approx(1.2)


def test_long_steps_of_a_block_count_as_first_steps() -> None:
    block = CaseBlock(ADAPTIVE, 0.0, [2.0, 0.1, 0.11, 0.1, 0.29, 0.9, 0.1])

    assert real_controller.first_steps_s(block) == pytest.approx(2.9)


class Noted:
    """Limits that only note the speeds."""

    kind = "none"

    def __init__(self) -> None:
        self.speeds = dict[int, float]()

    def join(self, worker: int, pid: int) -> None:
        """Do nothing."""

    def leave(self, pid: int) -> None:
        """Do nothing."""

    def set_speed(self, worker: int, speed: float) -> None:
        """Note a speed."""
        self.speeds[worker] = speed

    def close(self) -> None:
        """Do nothing."""


def test_speeds_are_set_as_rank_0_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits, watch = Noted(), StepWatch(case(50), tmp_path / "news")
    conductor = Conductor(limits, LineTail(tmp_path / "news"), None, "some")
    for speeds in (SLOW, FAST):
        watch.tell("speeds", speeds=speeds)
        watch.tell("block", arm=ADAPTIVE, number=0, whole_s=1.5, moves=2, shares=[3, 4])
        conductor.look(LaunchProgress(1, 2.0))
        assert tuple(limits.speeds.values()) == speeds

    assert "round 1, adaptive: 1.5 s, 2 moves, samples 3/4" in capsys.readouterr().err


def test_a_rehearsal_trains_every_arm_and_leaves_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    command = ["--case", "interference", "--quick", "--json", "--out", str(out)]
    before = psutil.Process().children(recursive=True)
    code = real_controller.main(command)
    (found,) = json.loads(capsys.readouterr().out)["results"]
    (filed,) = json.loads(out.read_text())["reports"].values()

    assert code == real_controller.DISTURBED, "one round has no interval"
    assert (found["case"], found["rounds"]) == ("interference", 1)
    for block in (*filed["cold"], *filed["rounds"][0]["blocks"]):
        assert len(block["steps_s"]) == 16
        assert sum(block["shares"]) == filed["batch"]
    assert [block["arm"] for block in filed["cold"]] == list(ARMS)
    assert [one for one in psutil.Process().children(recursive=True) if one not in before] == []
