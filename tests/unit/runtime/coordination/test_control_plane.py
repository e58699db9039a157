"""A rank alone exchanges with itself, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.control_plane import ControlPlane, Local
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.store.store_channel import LocalChannel
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
