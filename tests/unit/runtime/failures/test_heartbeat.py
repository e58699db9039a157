"""Which rank broke a collective, according to the heartbeats."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenstride.errors import WorkerLost
from evenstride.runtime.failures import heartbeat
from evenstride.runtime.failures.heartbeat import ENDED, Beat, Heartbeats, diagnose, ending_error
from evenstride.runtime.failures.peers import Peer, myself, watch_exit
from evenstride.runtime.session.rank_calls import ahead
from evenstride.runtime.store.store_channel import Channel
from tests.messages import check_message
from tests.unit.runtime.quiet import Clock, SetBeats, channel

ME, STEP = 0, 25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that advances only by sleeping, with heartbeats that follow it."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def _diagnose(beats: SetBeats, known: bool = False) -> tuple[int, str] | None:
    return diagnose(cast("Heartbeats", beats), ME, STEP, lambda: known)


def _beating(clock: Clock, beats: SetBeats, *silent: int) -> None:
    """Let all heartbeats follow the clock, except those of some ranks."""

    def beat() -> None:
        beats.latest = {
            rank: beat if rank in silent else Beat(beat.count + 1, beat.phase, beat.step)
            for rank, beat in beats.latest.items()
        }

    clock.slept = beat


def _beats(**phases: str) -> SetBeats:
    """Return beats by rank: ``_1="compute 25"`` and so on; this rank is in sync."""
    beats = {ME: Beat(3, "sync", STEP)}
    for rank, text in phases.items():
        phase, step = text.split()
        beats[int(rank[1:])] = Beat(3, phase, int(step))
    return SetBeats(beats)


def test_a_stopped_heartbeat_is_detected(clock: Clock) -> None:
    beats = _beats(_1="sync 25", _2="compute 25")
    _beating(clock, beats, 2)

    check_message(_diagnose(beats), "step 25")
    assert heartbeat.MISSED_S <= clock.now_s < heartbeat.SILENT_S


def test_a_heartbeat_gets_more_time_if_this_ranks_own_is_slow(clock: Clock) -> None:
    beats = _beats(_1="sync 25", _2="compute 25")
    _beating(clock, beats, ME, 2)

    check_message(_diagnose(beats), "step 25")
    assert clock.now_s >= heartbeat.SILENT_S, "a slow heartbeat gets its time"


def test_a_late_heartbeat_is_not_blamed(clock: Clock) -> None:
    beats = _beats(_1="sync 25", _2="sync 25")
    _beating(clock, beats, 2)
    beat = clock.slept

    def late() -> None:
        beat()
        if clock.now_s > heartbeat.MISSED_S - 0.2:
            beats.latest[2] = Beat(4, "sync", STEP)

    clock.slept = late

    assert _diagnose(beats) is None


def test_a_rank_that_still_computes_is_found_if_all_heartbeats_continue(clock: Clock) -> None:
    beats = _beats(_1="sync 25", _2="compute 25")
    _beating(clock, beats)

    check_message(_diagnose(beats), "step 25")


def test_a_rank_that_left_the_loop_is_found_if_all_heartbeats_continue(clock: Clock) -> None:
    beats = _beats(_1="sync 25", _2="left 24")
    _beating(clock, beats)

    found = _diagnose(beats)

    left = "it left the training loop in step 24; all ranks must leave it after the same step"
    assert found == (2, left)


@pytest.mark.parametrize("where", ["sync 25", "failed 25", "decision 25", "compute 26"])
def test_a_rank_that_also_waits_or_is_ahead_is_not_blamed(clock: Clock, where: str) -> None:
    beats = _beats(_1="sync 25", _2=where)
    _beating(clock, beats)

    assert _diagnose(beats) is None


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
    beats = _beats(_1="sync 25")
    beats.latest |= {ME: Beat(4, ENDED, 25, "mine"), 2: last}
    _beating(clock, beats)

    check_message(_diagnose(beats), *how)
    assert clock.now_s == 0.0


def test_an_end_during_the_watch_is_found(clock: Clock) -> None:
    beats = _beats(_1="sync 25")

    def part() -> None:
        if clock.now_s > 1.0:
            beats.latest[1] = Beat(4, ENDED, 25, "OSError: no space")

    clock.slept = part

    check_message(_diagnose(beats))
    assert clock.now_s < heartbeat.SILENT_S


def test_a_rank_that_ended_at_a_later_step_is_not_blamed(clock: Clock) -> None:
    beats = _beats()
    beats.latest[1] = Beat(4, ENDED, 26)
    _beating(clock, beats)

    assert _diagnose(beats) is None


def test_the_watch_ends_when_another_rank_reports_the_loss(clock: Clock) -> None:
    beats = _beats(_1="sync 25")

    _diagnose(beats, known=True)

    assert clock.now_s == 0.0


def test_a_heartbeat_describes_its_phase_in_words() -> None:
    assert Beat(9, "data", 4).where == "data of step 4"
    assert Beat(1, "idle", -1).where == "before its first step"


def test_a_rank_that_an_error_ended_is_lost_not_ahead() -> None:
    beats = {0: Beat(3, "sync", 4), 1: Beat(3, "compute", 4), 2: Beat(9, ENDED, 2)}
    assert ahead(beats, 4) == {0: "sync of step 4", 2: "its program ended early"}

    with pytest.raises(WorkerLost) as lost:
        ahead({**beats, 1: Beat(4, ENDED, 4, "ValueError: no data")}, 4)
    check_message(lost.value, "rank 1", "it ended with ValueError: no data", "step 4")


def test_a_rank_publishes_its_phase_and_its_end() -> None:
    shared, lost = channel(rank=1), list[int]()
    peers = tuple(Peer(rank, "host", "elsewhere", 1) for rank in range(3))
    mine = Heartbeats(shared, peers, lambda: ("compute", 7), lambda rank, _: lost.append(rank))

    beats = mine.beats()
    shared.put("beat/0", '[8, "sync", 7, null]')
    shared.put("beat/2", '[9, "ended", 4, null]')
    mine.close(7, "KeyError: 3")
    mine.close(99, None)

    assert (beats[1].phase, beats[1].step) == ("compute", 7)
    assert set(beats) == {1}, "no heartbeat of the others has arrived"
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


def test_a_process_on_another_machine_cannot_be_watched() -> None:
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
    """A rank that waits in a step; the test drives its liveness thread.

    Args:
        clock: the clock of the test.
        rank: its number.
        world_size: the number of ranks.
        silent_s: see `Heartbeats`.
        ring: see `Heartbeats`.
        timeout_s: the process group's timeout.
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
        """Advance the time, with one check per second."""
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
def test_a_second_of_waiting_costs_two_requests_for_any_number_of_ranks(
    clock: Clock, world_size: int
) -> None:
    watch = Watch(clock, 2, world_size, silent_s=1000.0)
    watch.wait(10)
    Counted.asked = 0

    watch.wait(10)
    watch.liveness.close(7, None)

    assert Counted.asked <= 20 + 1, "one heartbeat and one check per second, and the last one"


@pytest.mark.parametrize("rank", range(4))
def test_a_silent_rank_is_found_by_the_rank_before_it(clock: Clock, rank: int) -> None:
    watch = Watch(clock, rank, 4)
    watch.beating.discard(3)

    watch.wait(40)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == ([3] if rank == 2 else [])


def test_after_finding_a_lost_rank_the_next_one_is_watched(clock: Clock) -> None:
    watch = Watch(clock, 1, 4)
    watch.beating -= {2, 3, 0}

    watch.wait(200)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [2, 3, 0]


def test_in_asynchronous_modes_all_heartbeats_are_watched(clock: Clock) -> None:
    watch = Watch(clock, 0, 4, ring=False)
    watch.beating -= {2, 3}

    watch.wait(40)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [2, 3]


@pytest.mark.parametrize("rank", [1, 3])
def test_in_asynchronous_modes_the_other_ranks_watch_the_leader(clock: Clock, rank: int) -> None:
    watch = Watch(clock, rank, 5, ring=False)
    watch.beating -= {0, 2, 4}

    watch.wait(40)
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [0]


def test_the_leader_finds_no_rank_lost_while_none_waits(clock: Clock) -> None:
    watch = Watch(clock, 0, 3, ring=False)
    watch.at, watch.beating = ("data", 7), set()

    watch.wait(60)
    watch.liveness.close(7, None)

    assert watch.lost == []


def test_the_leader_finds_a_lost_rank_although_the_rank_that_waits_is_slow(clock: Clock) -> None:
    watch = Watch(clock, 0, 3, ring=False)
    watch.at = ("data", 7)  # the leader itself does not wait
    watch.beating = {1}

    for _ in range(25):  # the waiting rank misses every second look
        watch.wait(1)
        clock.sleep(1.0)
        watch.liveness.look()
    watch.liveness.close(7, None)

    assert [lost for lost, _ in watch.lost] == [2]


def test_few_ranks_read_all_heartbeats_even_if_their_collectives_fail_one_after_another(
    clock: Clock,
) -> None:
    ranks, store, asked = 30, HashStore(), list[bool]()
    at, watches = ("sync", 7), list[Heartbeats]()
    for rank in range(ranks):
        of = Channel(rank, ranks, timedelta(seconds=600), store, store, store)
        peers = tuple(Peer(other, "host", f"place {other}", 1) for other in range(ranks))
        watches.append(Heartbeats(of, peers, lambda: at, lambda *_: None, 30.0))
    for watch in watches:
        watch.look()
    at = ("failed", 7)

    for watch in watches:
        asked.append(watch.reads_all("failed/7"))
        for earlier in watches:
            earlier.look()
    for watch in watches:
        watch.close(7, None)

    assert asked == [True] * 8 + [False] * (ranks - 8)


@pytest.mark.parametrize("reported_s", [2.0, None])
def test_a_rank_that_does_not_read_waits_for_the_report_of_those_that_do(
    clock: Clock, reported_s: float | None
) -> None:
    class Full(SetBeats):
        """Enough other ranks read the heartbeats."""

        def reads_all(self, occasion: str) -> bool:
            """Return that this rank does not."""
            return not occasion

        def beats(self) -> dict[int, Beat]:
            """Return nothing, because it must not be called."""
            raise AssertionError

    begun_s = clock.monotonic()

    def known() -> bool:
        return reported_s is not None and clock.monotonic() - begun_s >= reported_s

    assert diagnose(cast("Heartbeats", Full({})), ME, STEP, known) is None
    waited_s = clock.monotonic() - begun_s
    if reported_s is None:  # longer than a rank that reads takes to find nothing
        assert heartbeat.SILENT_S < waited_s < 2 * heartbeat.SILENT_S
    else:
        assert waited_s == pytest.approx(reported_s, abs=0.5)


def test_nothing_stays_in_the_store_of_who_reads_in_past_steps(clock: Clock) -> None:
    watch = Watch(clock, 2, 20)
    assert watch.liveness.reads_all("sync/7/1")
    assert watch.channel.present(["reads/sync/7/1"]) == [True]

    watch.at = ("sync", 8)
    watch.wait(1)
    watch.liveness.close(8, None)

    assert watch.channel.present(["reads/sync/7/1"]) == [False]


@pytest.mark.parametrize("phase", ["data", "between", "idle"])
def test_a_rank_that_does_not_wait_watches_no_rank(clock: Clock, phase: str) -> None:
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
def test_a_long_wait_for_a_rank_that_left_the_loop_causes_a_warning(
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
def test_the_awaited_ranks_are_named_soon_and_before_the_timeout(
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
