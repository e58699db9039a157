"""A rank alone exchanges with itself, on its own thread; a leader decides apart from the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from evenstride.core.control.events import FleetFormed, Verdict
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.control_plane import ControlPlane, Local, announce_loss
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.failures.heartbeat import Heartbeats
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.store.store_channel import Channel, LocalChannel
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord
from evenstride.trace.codec import TraceWriter
from evenstride.trace.run_log import RunLog
from tests.messages import raises_message


class Alone:
    """One process that trains, and its plane."""

    def __init__(self, trace: Path) -> None:
        self.leader = Leader(Control(policy_from_spec("adaptive")))
        self.leader.form(FleetFormed(0, 0, 8, (Worker("one/0"),)))
        self.leader.record_to(TraceWriter(trace, {"policy": "adaptive"}))
        self.gate, self.recorder, self.step = DrawBarrier((8,)), Recorder(0, lambda: None), 0
        self.stands: tuple[tuple[int, int, int], ...] = ()
        self.saves = SaveSchedule(lambda: None)
        local = Local(
            self.gate, self.recorder, lambda: Position(self.step, self.stands), self.saves
        )
        self.plane = ControlPlane(LocalChannel(), local, (8,), self.leader)

    def train(self) -> None:
        self.gate.draw(self.step)
        self.recorder.append(StepRecord(self.step, 8, 0.1, 0.0, 0.0, 0.0, 0.0, True))
        self.step += 1
        self.plane.tick(self.step)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path / "trace.jsonl")
    yield made
    made.plane.close()


def test_it_exchanges_when_it_is_due_and_at_the_end_without_a_thread(
    alone: Alone, tmp_path: Path
) -> None:
    threads = threading.active_count()

    for _ in range(5):
        alone.train()
    alone.plane.close()
    alone.plane.close()

    assert threading.active_count() == threads
    (generation,) = RunLog(tmp_path / "trace.jsonl").processes[0].generations
    committed = [one.step for one in generation.exchanges]
    assert committed == [4, 5]
    assert [seen.steps for one in generation.exchanges for seen in one.observations] == [4, 1]


def test_a_request_is_answered_after_the_present_step(alone: Alone, tmp_path: Path) -> None:
    alone.plane.ask()
    alone.train()

    (generation,) = RunLog(tmp_path / "trace.jsonl").processes[0].generations
    assert [one.step for one in generation.exchanges] == [1]


def test_a_failed_decision_is_raised_by_the_next_draw(alone: Alone) -> None:
    alone.stands = ((0, 0, 0), (0, 1, 8))  # one place in the data cannot be two
    for _ in range(4):
        alone.train()

    with raises_message(SplitDiverged, "epoch 1"):
        alone.train()


class SlowLeader(Leader):
    """A leader whose decision lasts until the test lets it end."""

    def __init__(self) -> None:
        super().__init__(Control(policy_from_spec("uniform")))
        self.form(FleetFormed(0, 0, 8, (Worker("one/0"), Worker("one/1"))))
        self.decides, self.may_end = threading.Event(), threading.Event()

    def exchange(self, *what: Any, **more: Any) -> Verdict:
        """Decide when the test says so."""
        self.decides.set()
        assert self.may_end.wait(60)
        return super().exchange(*what, **more)


def test_a_slow_decision_holds_up_neither_heartbeats_nor_training_nor_the_report_of_a_loss() -> (
    None
):
    store: Store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    both = [Channel(rank, 2, timedelta(seconds=60), store, store, store) for rank in (0, 1)]
    leader, received = SlowLeader(), [threading.Event(), threading.Event()]
    gates = [DrawBarrier((4, 4)) for _ in both]
    locals_ = [
        Local(
            gate, Recorder(rank, lambda: None), lambda: Position(0, ()), SaveSchedule(lambda: None)
        )
        for rank, gate in enumerate(gates)
    ]
    planes = [
        ControlPlane(both[0], locals_[0], (4, 4), leader, lambda _: received[0].set()),
        ControlPlane(both[1], locals_[1], (4, 4), None, lambda _: received[1].set()),
    ]
    peers = tuple(Peer(rank, "one", f"place {rank}", 1) for rank in (0, 1))
    liveness = Heartbeats(both[0], peers, lambda: ("compute", 0), lambda *_: None)
    try:
        planes[1].ask()
        assert leader.decides.wait(60)

        before = liveness.beats([0])[0].count
        liveness.look()
        assert liveness.beats([0])[0].count > before
        assert [gate.draw(0) for gate in gates] == [(4, 4), (4, 4)], "below both barriers"
        announce_loss(both[1], 0, 1, "rank 1 is gone")
        assert received[1].wait(60), "it waits for the decision, and gets the report instead"
        assert not received[0].is_set()
    finally:
        leader.may_end.set()
        assert received[0].wait(60), "after the decision"
        liveness.close(0, None)
        for plane in planes:
            plane.close()
