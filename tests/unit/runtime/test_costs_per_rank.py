"""What liveness and exchanges ask of the store does not grow with the number of ranks.

The cost of a scene is the number of requests and of keys in them, as a mean over all ranks. One
rank may ask about all others, and a few may when a rank is lost. If every rank did, the mean would
grow with the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from benchmarks.scale import CountedStore, Tally
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.runtime.coordination.control_plane import ControlPlane, Local, announce_loss
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.failures import heartbeat, peer_link
from evenstride.runtime.failures.heartbeat import Heartbeats
from evenstride.runtime.failures.peer_link import LossReport, look_for_the_lost
from evenstride.runtime.failures.peers import Peer, packed, unpacked
from evenstride.runtime.failures.survivors import Survivors
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.session.rank_calls import RankCalls, Whereabouts
from evenstride.runtime.store import store_channel
from evenstride.runtime.store.store_channel import Channel, nap_s
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord, StepTimer
from tests.unit.runtime.quiet import Clock

FEW, FACTOR = 16, 4
# Costs that do not grow may still differ, because rank 0 and a few others do more.
MORE = 1.3
LONG = timedelta(seconds=60)


class WidthStore(CountedStore):
    """A counted store that notes the most keys in one request."""

    def __init__(self, store: Store, tally: Tally) -> None:
        super().__init__(store, tally)
        self.most = 0

    def check(self, keys: list[str]) -> bool:
        """Return whether keys exist."""
        self.most = max(self.most, len(keys))
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys."""
        self.most = max(self.most, len(keys))
        return super().multi_get(keys)


class Many:
    """The channels of all ranks to one store."""

    def __init__(self, world_size: int) -> None:
        self.store: Store = HashStore()
        self.store.set_timeout(LONG)
        self.ranks, self.tally, self.beats = range(world_size), Tally(), 0
        self.stores = [WidthStore(self.store, self.tally) for _ in self.ranks]
        self.channels = [
            Channel(rank, world_size, timedelta(seconds=600), *([cast(Any, mine)] * 3))
            for rank, mine in zip(self.ranks, self.stores, strict=True)
        ]
        self.peers = tuple(Peer(rank, "host", f"place {rank}", 1) for rank in self.ranks)

    def cost(self, play: Callable[[], object]) -> float:
        """Return the requests and keys per rank of what ``play`` does."""
        before = self.tally.requests + self.tally.keys
        play()
        return (self.tally.requests + self.tally.keys - before) / len(self.ranks)

    def beat(self) -> None:
        """Let every rank send a heartbeat, which is not counted."""
        self.beats += 1
        for rank in self.ranks:
            self.store.set(f"beat/{rank}", f'[{self.beats}, "failed", 7, null]')

    def watches(self, *, ring: bool = True) -> list[Heartbeats]:
        """Return the heartbeats of all ranks, which wait in a step."""
        return [
            Heartbeats(one, self.peers, lambda: ("sync", 7), lambda *_: None, 1e6, ring=ring)
            for one in self.channels
        ]

    def together(self, do: Callable[[int], object]) -> None:
        """Call a function for each rank, each on a thread of its own, and wait for all."""
        threads = [threading.Thread(target=do, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that advances only by sleeping, for liveness threads that the test drives."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(peer_link, "time", clock)
    monkeypatch.setattr(heartbeat, "BEAT_S", 1e3)  # the threads themselves only wait
    monkeypatch.setattr(heartbeat, "SILENT_S", 3.5)
    return clock


def grows(play: Callable[[int], float]) -> bool:
    """Return whether a cost per rank grows with the number of ranks."""
    return play(FEW * FACTOR) > MORE * play(FEW)


@pytest.mark.parametrize("ring", [True, False])
def test_waiting_costs_each_rank_the_same(clock: Clock, ring: bool) -> None:
    def wait(world_size: int) -> float:
        many = Many(world_size)
        watches = many.watches(ring=ring)

        def seconds() -> None:
            for _ in range(40):  # until after the first warning
                clock.sleep(1.0)
                for watch in watches:
                    watch.look()

        cost = many.cost(seconds)
        for watch in watches:
            watch.close(7, None)
        return cost

    assert not grows(wait)


def test_a_failed_collective_costs_each_rank_the_same(clock: Clock) -> None:
    def fail(world_size: int) -> float:
        many = Many(world_size)
        watches = many.watches()

        def look() -> None:
            # All ranks still respond, so each looks as long as it can.
            for rank, watch in enumerate(watches):
                report = LossReport(many.channels[rank], DrawBarrier((1,)), lambda: ("sync", 7))
                look_for_the_lost(report, watch, rank, 7, lambda *_: None)

        clock.slept = many.beat
        cost = many.cost(look)
        for watch in watches:
            watch.close(7, None)
        return cost

    assert not grows(fail)


def test_a_report_of_a_loss_costs_each_rank_the_same() -> None:
    def report(world_size: int) -> float:
        many = Many(world_size)

        def announce() -> None:
            for one in many.channels:
                announce_loss(one, 3, 2, "gone")

        return many.cost(announce)

    assert not grows(report)


class ToldBarrier(DrawBarrier):
    """A draw barrier that reports decisions."""

    def __init__(self, decided: threading.Semaphore) -> None:
        super().__init__((1,) * 2)
        self._decided = decided

    def decide(self, *what: Any, **more: Any) -> None:
        """Apply a decision, and report it."""
        super().decide(*what, **more)
        self._decided.release()


def exchange(many: Many) -> None:
    """Exchange once without moving the shares, and report a loss, which ends the threads."""
    decided, ended = threading.Semaphore(0), threading.Semaphore(0)
    leader = Leader(Control(policy_from_spec("uniform")))
    workers = tuple(Worker(f"host/{rank}") for rank in many.ranks)
    leader.form(FleetFormed(0, 0, 8 * len(workers), workers))
    planes = []
    for one in many.channels:
        recorder = Recorder(one.rank, lambda: None)
        for step in range(4):
            recorder.append(StepRecord(step, 8, 0.1 / 3, 0.0, 0.0, 0.0, 0.0, step > 0))
        gate, saves = ToldBarrier(decided), SaveSchedule(lambda: None)
        local = Local(gate, recorder, lambda: Position(4, ()), saves)
        mine = leader if one.rank == 0 else None
        planes.append(
            ControlPlane(one, local, (8,) * len(workers), mine, lambda _: ended.release())
        )
    planes[0].ask()
    for _ in planes:
        assert decided.acquire(timeout=60)
    announce_loss(many.channels[0], 0, 1, "rank 1 is gone")
    # All of them, because a rank that closes starts one more exchange with those that still run.
    for _ in planes:
        assert ended.acquire(timeout=60)
    for plane in planes:
        plane.close()


def test_an_exchange_costs_each_rank_the_same() -> None:
    read_bytes = {}

    def play(world_size: int) -> float:
        many = Many(world_size)
        cost = many.cost(lambda: exchange(many))
        read_bytes[world_size] = many.tally.received_bytes / world_size
        return cost

    assert not grows(play)
    assert read_bytes[FEW * FACTOR] <= MORE * read_bytes[FEW]


def test_a_rank_that_waits_in_a_mean_asks_about_the_leader_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_channel, "LOOK_S", 0.0)
    many, looked, last = Many(FEW), dict[int, int](), threading.Event()

    def calls_of(rank: int) -> RankCalls:
        gate = DrawBarrier((1,))
        clock = RankClock(StepTimer(Recorder(rank, lambda: None)))

        def beats(*ranks: Any) -> dict[int, Any]:
            looked[rank] = len(ranks[0]) if ranks else FEW
            if len(looked) == FEW - 1:
                last.set()
            return {}

        where = Whereabouts(clock, gate, None)
        progress = CommittedPosition(0, 8)
        return RankCalls(many.channels[rank], None, clock, gate, progress, beats, where, None)

    def mean(rank: int) -> None:
        if rank == FEW - 1:
            assert last.wait(60)
        calls_of(rank).meet("mean()", dict, lambda _: {})

    many.together(mean)

    assert looked.pop(0) == FEW
    assert {looked[rank] for rank in range(1, FEW - 1)} == {1}


def test_only_the_leader_reads_the_values_of_a_mean_without_a_common_step() -> None:
    many, sums = Many(FEW), dict[int, Any]()
    free: Any = SimpleNamespace(report=dict, waiting=threading.Lock)

    def mean(rank: int) -> None:
        survivors = Survivors(free, (1,) * FEW, DrawBarrier((1,)))
        values = torch.tensor([float(rank), 0.25], dtype=torch.float64)
        sums[rank] = survivors.summed(many.channels[rank], "mean 1", values).tolist()

    many.together(mean)

    assert {tuple(one) for one in sums.values()} == {(sum(many.ranks), 0.25 * FEW)}
    assert len(sums) == FEW
    assert {store.most for store in many.stores[1:]} == {1}


def test_the_announcement_of_a_team_names_each_machine_once() -> None:
    peers = [Peer(r, f"host {r // 8}", f"place {r // 8}", r, "cpu", r % 8, 5.0) for r in range(64)]

    plain = packed(peers)

    assert len(plain["machines"]) == 8
    assert unpacked(plain) == tuple(peers)


def test_all_waiting_ranks_together_poll_the_store_at_a_limited_rate() -> None:
    assert nap_s(2, few_s=0.01) == 0.01
    assert all(ranks / nap_s(ranks, few_s=0.0002) <= 20_001 for ranks in (2, 64, 1024, 4096))
