"""Which rank broke a collective, from what the heartbeats and goodbyes say."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from evenstride.runtime import liveness
from evenstride.runtime.liveness import Beat, Liveness, diagnose, ending_error
from evenstride.runtime.peers import Peer, myself, watch_exit
from tests.unit.runtime.quiet import Clock, Told, channel, message

ME, STEP = 0, 25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only sleeping moves, with hearts that beat while it moves."""
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    return clock


def _diagnose(told: Told, known: bool = False) -> tuple[int, str] | None:
    return diagnose(cast("Liveness", told), ME, STEP, lambda: known)


def _beating(clock: Clock, told: Told, *silent: int) -> None:
    """Let every heart beat on with the clock, except some."""

    def beat() -> None:
        told.told = {
            rank: beat if rank in silent else Beat(beat.count + 1, beat.phase, beat.step)
            for rank, beat in told.told.items()
        }

    clock.slept = beat


def _told(**phases: str) -> Told:
    """Return beats by rank: ``_1="compute 25"`` and so on; this rank is in sync."""
    beats = {ME: Beat(3, "sync", STEP)}
    for rank, text in phases.items():
        phase, step = text.split()
        beats[int(rank[1:])] = Beat(3, phase, int(step))
    return Told(beats)


def test_a_heart_that_has_stopped_is_found(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="compute 25")
    _beating(clock, told, 2)

    assert _diagnose(told) == (2, "no heartbeat since compute of step 25")
    assert liveness.MISSED_S <= clock.now_s < liveness.SILENT_S


def test_a_heart_gets_more_time_where_this_rank_s_own_is_slow(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="compute 25")
    _beating(clock, told, ME, 2)

    assert _diagnose(told) == (2, "no heartbeat since compute of step 25")
    assert clock.now_s >= liveness.SILENT_S, "a slow heart gets its time"


def test_a_heart_that_beats_late_is_not_blamed(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="sync 25")
    _beating(clock, told, 2)
    beat = clock.slept

    def late() -> None:
        beat()
        if clock.now_s > liveness.MISSED_S - 0.2:
            told.told[2] = Beat(4, "sync", STEP)

    clock.slept = late

    assert _diagnose(told) is None


def test_a_rank_that_is_still_computing_is_found_when_all_hearts_beat(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="compute 25")
    _beating(clock, told)

    assert _diagnose(told) == (2, "still in compute of step 25")


@pytest.mark.parametrize("where", ["sync 25", "failed 25", "compute 26"])
def test_a_rank_that_waits_as_well_or_is_further_on_is_not_blamed(clock: Clock, where: str) -> None:
    told = _told(_1="sync 25", _2=where)
    _beating(clock, told)

    assert _diagnose(told) is None


@pytest.mark.parametrize(
    ("goodbye", "how"),
    [
        ({"step": 25, "error": "ValueError: bad"}, "it ended with ValueError: bad"),
        ({"step": 25, "error": None}, "its program ended early"),
        ({"step": 3}, "its program ended early"),
        ({}, "its program ended early"),
    ],
)
def test_a_rank_that_said_goodbye_is_found_at_once(
    clock: Clock, goodbye: dict[str, Any], how: str
) -> None:
    told = _told(_1="sync 25", _2="sync 25")
    told.parted = {ME: {"error": "mine"}, 2: goodbye}
    _beating(clock, told)

    assert _diagnose(told) == (2, how)
    assert clock.now_s == 0.0


def test_a_goodbye_that_comes_while_watching_is_found(clock: Clock) -> None:
    told = _told(_1="sync 25")

    def part() -> None:
        if clock.now_s > 1.0:
            told.parted = {1: {"step": 25, "error": "OSError: no space"}}

    clock.slept = part

    assert _diagnose(told) == (1, "it ended with OSError: no space")
    assert clock.now_s < liveness.SILENT_S


def test_who_ended_at_a_later_step_did_not_break_this_one(clock: Clock) -> None:
    told = _told(_1="sync 25")
    told.parted = {1: {"step": 26, "error": None}}
    _beating(clock, told)

    assert _diagnose(told) is None


def test_watching_ends_when_the_answer_comes_from_elsewhere(clock: Clock) -> None:
    told = _told(_1="sync 25")

    _diagnose(told, known=True)

    assert clock.now_s == 0.0


def test_a_beat_tells_in_words_where_it_was() -> None:
    assert Beat(9, "data", 4).where == "data of step 4"
    assert Beat(1, "idle", -1).where == "before its first step"


def test_a_rank_tells_what_it_does_and_says_goodbye() -> None:
    told, lost = channel(rank=1), list[int]()
    peers = tuple(Peer(rank, "host", "elsewhere", 1) for rank in range(3))
    mine = Liveness(told, peers, lambda: ("compute", 7), lambda rank, _: lost.append(rank))
    told.put("bye/2", '{"step": 4, "error": null}')

    beats, goodbyes = mine.beats(), mine.goodbyes()
    mine.close({"step": 7, "error": "KeyError: 3"})
    mine.close({"step": 99})

    assert (beats[1].phase, beats[1].step) == ("compute", 7)
    assert set(beats) == {1}, "the others have not been heard of"
    assert goodbyes == {2: {"step": 4, "error": None}}
    assert message(told, "bye/1") == {"step": 7, "error": "KeyError: 3"}
    assert lost == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, None),
        (KeyboardInterrupt(), None),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (RuntimeError("x" * 900), "RuntimeError: " + "x" * 700),
    ],
)
def test_the_error_that_ends_a_program_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, text: str | None
) -> None:
    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)

    assert ending_error() == text


def test_a_process_of_another_place_cannot_be_watched() -> None:
    me = myself(4)

    assert me.name == f"{me.host}/4"
    assert Peer(**me.to_plain()) == me
    assert watch_exit(Peer(1, me.host, "another machine", me.pid)) is None
