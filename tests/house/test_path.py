"""The modules that a measured time passes through, up to the split that follows from it.

The test times the steps of two ranks, exchanges them as text, decides and draws the new split. It
notes every module of the package that Python enters, so that a detour cannot go unnoticed.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import FrameType
from typing import Any

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.runtime.coordination.control_plane import Local, apply
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import (
    Leader,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_from_plain,
    verdict_to_plain,
)
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepTimer
from evenstride.testing import FakeClock

# In the order in which the time, and then the new split, reaches them.
PATH = (
    "runtime.timing.step_timer",
    "runtime.timing.recorder",
    "runtime.coordination.control_plane",
    "runtime.store.store_channel",
    "runtime.coordination.leader",
    "core.control.advance",
    "core.time_model.observation",
    "core.control.state",
    "core.time_model.kalman",
    "core.time_model.share_times",
    "core.time_model.change_detection",
    "core.time_model.estimates",
    "core.time_model.curve_update",
    "core.time_model.wave_search",
    "core.policy",
    "core.policies.adaptive",
    "core.policies.speed_averages",
    "core.policies.measured_splits",
    "core.time_model.pooling",
    "core.allocation.recurring_speeds",
    "core.allocation.step_forecast",
    "core.allocation.integer_splits",
    "core.allocation.memory",
    "core.control.schedule",
    "core.control.events",
    "runtime.coordination.draw_barrier",
)
# Used between processes only: this test passes the texts in memory.
BETWEEN_PROCESSES = {"runtime.store.store_channel"}
# Modules that an exchange enters but that neither time nor split passes, and what they do.
OFF_PATH = {
    "core.diagnostics.ledger": "accounts for the time that was lost",
    "core.allocation.speedup": "computes the reference of the ledger",
    "core.gradients.noise_scale": "estimates the gradient noise, which a reply carries too",
    "runtime.coordination.side_agreements": "agrees whether an epoch ends or a notice has come",
    "runtime.sinks.snapshot": "shows alerts and sinks the result",
    "core.fleet": "converts shares between arrays and tuples",
    "core.formatting": "words the reason of a decision",
    "testing.fake_clock": "is the clock of this test",
}
# Between two processes, text stands for the same columns or the same decision.
FORMS_OF_THE_TIME = (
    "runtime.timing.step_timer.StepRecord",
    "core.time_model.observation.Measurements",
    "core.time_model.observation.WorkerTimes",
)
FORMS_OF_THE_SPLIT = (
    "core.policy.Move",
    "core.control.events.Verdict",
    "core.control.schedule.Schedule",
)


class _Rank:
    """The parts of a rank that a time passes, with their own clock."""

    def __init__(self, rank: int, shares: Shares) -> None:
        self.rank, self.shares, self.clock, self.step = rank, shares, FakeClock(), 0
        self.recorder, self.gate = Recorder(rank, lambda: None), DrawBarrier(shares)
        self.timer = StepTimer(self.recorder, self.clock)
        self.local = Local(
            self.gate, self.recorder, lambda: Position(self.step, ()), SaveSchedule(lambda: None)
        )

    def train(self) -> None:
        share = self.gate.draw(self.step)[self.rank]
        self.timer.fetch_started()
        self.timer.fetch_ended(self.step, share, modelled=self.step > 0)
        self.clock.spend(0.01 + 0.001 * share * (1 + 2 * self.rank))
        self.timer.gradients_ready()
        self.clock.spend(0.001)
        self.timer.synchronised()
        self.step += 1

    def reply(self) -> str:
        self.timer.pass_ended()
        held = self.gate.hold()
        assert held is not None, "the barrier was not stopped"
        return reply_to_text(Reply(held.barrier, held.checksum, (), self.recorder.take()))

    def hear(self, text: str) -> None:
        verdict = verdict_from_plain(json.loads(text))
        self.shares = apply(verdict, self.rank, self.local, self.shares)


def _trained() -> tuple[set[str], Shares]:
    """Return the modules that Python entered, and the last split."""
    leader, entered = Leader(Control(policy_from_spec("adaptive"))), set[str]()
    workers = (Worker("one/0"), Worker("two/1"))
    opening = leader.form(FleetFormed(0, 0, 96, workers)).shares
    assert opening is not None, "a new fleet has a split"
    leader.skip_opening(0)
    ranks = [_Rank(rank, opening) for rank in range(len(workers))]

    def note(frame: FrameType, event: str, arg: Any) -> None:
        del event, arg
        entered.add(str(frame.f_globals.get("__name__", "")))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(24):
            for one in ranks:
                one.train()
            if ranks[0].step % 8 == 0:
                replies = [reply_from_text(one.reply()) for one in ranks]
                verdict = leader.exchange(ranks[0].step, replies, replies[0].checksum)
                for one in ranks:
                    one.hear(json.dumps(verdict_to_plain(verdict)))
    finally:
        sys.setprofile(before)
    ours = {name.removeprefix("evenstride.") for name in entered if name.startswith("evenstride.")}
    return ours, ranks[0].gate.draw(ranks[0].step)


def test_a_time_passes_the_modules_of_the_path_and_no_others() -> None:
    entered, shares = _trained()

    assert shares[0] > 2 * shares[1], "the times changed the split"
    assert entered - OFF_PATH.keys() == set(PATH) - BETWEEN_PROCESSES


def test_the_forms_of_time_and_split_are_types_of_the_path() -> None:
    for form in (*FORMS_OF_THE_TIME, *FORMS_OF_THE_SPLIT):
        module, _, name = form.rpartition(".")
        assert isinstance(getattr(import_module(f"evenstride.{module}"), name), type)
        assert module in PATH


def test_the_path_gets_no_longer() -> None:
    assert len(PATH) <= 26
    assert len(FORMS_OF_THE_TIME) <= 4
    assert len(FORMS_OF_THE_SPLIT) <= 4
