"""Which rank broke a collective, from what the heartbeats and goodbyes say."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import cast

import pytest

from evenstride.runtime.failures import heartbeat
from evenstride.runtime.failures.heartbeat import ENDED, Beat, Heartbeats, diagnose, ending_error
from evenstride.runtime.failures.peers import Peer, myself, watch_exit
from evenstride.runtime.store.store_channel import Channel
from tests.messages import check_message
from tests.unit.runtime.quiet import Clock, Told, channel

ME, STEP = 0, 25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only sleeping moves, with hearts that beat while it moves."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def _diagnose(told: Told, known: bool = False) -> tuple[int, str] | None:
    return diagnose(cast("Heartbeats", told), ME, STEP, lambda: known)


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

    check_message(_diagnose(told), "step 25")
    assert heartbeat.MISSED_S <= clock.now_s < heartbeat.SILENT_S


def test_a_heart_gets_more_time_where_this_rank_s_own_is_slow(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="compute 25")
    _beating(clock, told, ME, 2)

    check_message(_diagnose(told), "step 25")
    assert clock.now_s >= heartbeat.SILENT_S, "a slow heart gets its time"


def test_a_heart_that_beats_late_is_not_blamed(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="sync 25")
    _beating(clock, told, 2)
    beat = clock.slept

    def late() -> None:
        beat()
        if clock.now_s > heartbeat.MISSED_S - 0.2:
            told.told[2] = Beat(4, "sync", STEP)

    clock.slept = late

    assert _diagnose(told) is None


def test_a_rank_that_is_still_computing_is_found_when_all_hearts_beat(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="compute 25")
    _beating(clock, told)

    check_message(_diagnose(told), "step 25")


def test_a_rank_that_left_the_loop_is_found_when_all_hearts_beat(clock: Clock) -> None:
    told = _told(_1="sync 25", _2="left 24")
    _beating(clock, told)

    found = _diagnose(told)

    left = "it left the training loop in step 24; all ranks must leave it after the same step"
    assert found == (2, left)


@pytest.mark.parametrize("where", ["sync 25", "failed 25", "decision 25", "compute 26"])
def test_a_rank_that_waits_as_well_or_is_further_on_is_not_blamed(clock: Clock, where: str) -> None:
    told = _told(_1="sync 25", _2=where)
    _beating(clock, told)

    assert _diagnose(told) is None


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (Beat(4, ENDED, 25, "ValueError: bad"), ("ValueError",)),
        (Beat(4, ENDED, 25), ()),
        (Beat(4, ENDED, 3), ()),
    ],
)
def test_a_rank_whose_program_has_ended_is_found_at_once(
    clock: Clock, last: Beat, how: tuple[str, ...]
) -> None:
    told = _told(_1="sync 25")
    told.told |= {ME: Beat(4, ENDED, 25, "mine"), 2: last}
    _beating(clock, told)

    check_message(_diagnose(told), *how)
    assert clock.now_s == 0.0


def test_an_end_that_comes_while_watching_is_found(clock: Clock) -> None:
    told = _told(_1="sync 25")

    def part() -> None:
        if clock.now_s > 1.0:
            told.told[1] = Beat(4, ENDED, 25, "OSError: no space")

    clock.slept = part

    check_message(_diagnose(told))
    assert clock.now_s < heartbeat.SILENT_S


def test_who_ended_at_a_later_step_did_not_break_this_one(clock: Clock) -> None:
    told = _told()
    told.told[1] = Beat(4, ENDED, 26)
    _beating(clock, told)

    assert _diagnose(told) is None


def test_watching_ends_when_the_answer_comes_from_elsewhere(clock: Clock) -> None:
    told = _told(_1="sync 25")

    _diagnose(told, known=True)

    assert clock.now_s == 0.0


def test_a_beat_tells_in_words_where_it_was() -> None:
    assert Beat(9, "data", 4).where == "data of step 4"
    assert Beat(1, "idle", -1).where == "before its first step"


def test_a_rank_tells_what_it_does_and_that_it_ends() -> None:
    told, lost = channel(rank=1), list[int]()
    peers = tuple(Peer(rank, "host", "elsewhere", 1) for rank in range(3))
    mine = Heartbeats(told, peers, lambda: ("compute", 7), lambda rank, _: lost.append(rank))

    beats = mine.beats()
    told.put("beat/0", '[8, "sync", 7, null]')
    told.put("beat/2", '[9, "ended", 4, null]')
    mine.close(7, "KeyError: 3")
    mine.close(99, None)

    assert (beats[1].phase, beats[1].step) == ("compute", 7)
    assert set(beats) == {1}, "the others have not been heard of"
    assert mine.beats([2]) == {2: Beat(9, ENDED, 4)}
    assert mine.beats()[1].error == "KeyError: 3"
    assert mine.beats()[1].phase == ENDED
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


class Counted(Channel):
    """A channel that counts its requests to the store."""

    asked = 0

    def put(self, key: str, text: str) -> None:
        """Count, and set a key."""
        Counted.asked += 1
        super().put(key, text)

    def has(self, keys: list[str]) -> bool:
        """Count, and look for keys."""
        Counted.asked += 1
        return super().has(keys)

    def read(self, keys: list[str]) -> list[str]:
        """Count, and read keys."""
        Counted.asked += 1
        return super().read(keys)


class Watch:
    """One rank that stands in a step, whose liveness thread a test drives.

    Args:
        clock: that time is told by.
        rank: which of them.
        world_size: how many there are.
        silent_s: see `Heartbeats`.
        ring: likewise.
        timeout_s: of the process group.
    """

    def __init__(
        self,
        clock: Clock,
        rank: int,
        world_size: int,
        *,
        silent_s: float | None = 30.0,
        ring: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        of = channel(rank, world_size)
        timeout = timedelta(seconds=timeout_s)
        self.channel = Counted(rank, world_size, timeout, of.control, of.meeting, of.prompt)
        self.clock, self.at, self.lost = clock, ("sync", 7), list[tuple[int, str]]()
        self.beating, self._beat = set(range(world_size)) - {rank}, 1
        self._beat_all(set(range(world_size)))
        self.liveness = Heartbeats(
            self.channel,
            tuple(Peer(rank, "host", f"place {rank}", 1) for rank in range(world_size)),
            lambda: self.at,
            lambda rank, how: self.lost.append((rank, how)),
            silent_s,
            ring=ring,
        )

    def wait(self, seconds: float) -> None:
        """Let time pass, a look per second."""
        for _ in range(int(seconds)):
            self.clock.sleep(1.0)
            self._beat += 1
            self._beat_all(self.beating)
            self.liveness.look()

    def _beat_all(self, ranks: set[int]) -> None:
        for rank in ranks:
            phase = "sync" if rank in self.beating else "compute"
            Channel.put(self.channel, f"beat/{rank}", f'[{self._beat}, "{phase}", 7, null]')


@pytest.mark.parametrize("world_size", [4, 64, 256])
def test_a_second_of_waiting_costs_two_requests_whatever_the_number_of_ranks(
    clock: Clock, world_size: int
) -> None:
    watch = Watch(clock, 2, world_size, silent_s=1000.0)
    watch.wait(10)
    Counted.asked = 0

    watch.wait(10)
    watch.liveness.close(7, None)

    assert Counted.asked <= 20 + 1, "one heartbeat and one look per second, and the last one"


@pytest.mark.parametrize("rank", range(4))
def test_a_silent_heart_is_found_by_the_rank_before_it(clock: Clock, rank: int) -> None:
    watch = Watch(clock, rank, 4)
    watch.beating.discard(3)

    watch.wait(40)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == ([3] if rank == 2 else [])


def test_whoever_finds_a_rank_lost_watches_the_next_one(clock: Clock) -> None:
    watch = Watch(clock, 1, 4)
    watch.beating -= {2, 3, 0}

    watch.wait(200)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [2, 3, 0]


def test_where_ranks_do_not_wait_for_each_other_all_hearts_are_watched(clock: Clock) -> None:
    watch = Watch(clock, 0, 4, ring=False)
    watch.beating -= {2, 3}

    watch.wait(40)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [2, 3]


@pytest.mark.parametrize("phase", ["data", "between", "idle"])
def test_a_rank_that_waits_for_nobody_watches_nobody(clock: Clock, phase: str) -> None:
    watch = Watch(clock, 2, 4)
    watch.at = (phase, 7)
    watch.beating.discard(3)

    watch.wait(60)
    watch.liveness.close(7, None)

    assert watch.lost == []


@pytest.mark.parametrize(
    ("mine", "other", "named"),
    [
        ("compute", "left", True),  # in a collective of the model, such as that of DDP's buckets
        ("compute", "compute", False),
        ("decision", "left", True),
        ("between", "left", False),
    ],
)
def test_a_long_wait_for_a_rank_that_left_the_loop_is_warned_about_in_any_phase_that_may_wait(
    clock: Clock, caplog: pytest.LogCaptureFixture, mine: str, other: str, named: bool
) -> None:
    watch = Watch(clock, 2, 4, silent_s=None)
    watch.at = (mine, 7)
    watch.beating.discard(3)
    Channel.put(watch.channel, "beat/3", json.dumps([1, other, 6, None]))

    watch.wait(60)
    watch.liveness.close(7, None)

    left = "rank 3 (it left the training loop in step 6; all ranks must leave it after the same"
    assert any(left in record.getMessage() for record in caplog.records) == named


@pytest.mark.parametrize(
    ("timeout_s", "after_s"), [(600.0, [30, 590]), (30.0, [15, 20]), (10.0, [5])]
)
def test_who_is_waited_for_is_named_soon_and_before_the_timeout(
    clock: Clock, caplog: pytest.LogCaptureFixture, timeout_s: float, after_s: list[int]
) -> None:
    watch = Watch(clock, 2, 4, silent_s=None, timeout_s=timeout_s)
    watch.beating.discard(3)
    Channel.put(watch.channel, "beat/3", '[1, "compute", 7, null]')

    watch.wait(timeout_s + 20)
    watch.liveness.close(7, None)

    assert len(caplog.messages) == len(after_s)
    check_message(caplog.messages, "rank 3", *(f"{seconds} s" for seconds in after_s))
    assert f"{timeout_s:.0f} s" in caplog.messages[-1]
