"""What a run sums up itself is what the report makes of its trace, whatever happens in it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.schedule import Schedule
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.report.analysis.attribution import totals_of
from evenstride.report.analysis.run_generation import durations_s
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.page.page_runs import Leg, run_of
from evenstride.report.page.series_charts import step_times
from evenstride.runtime.coordination.draw_barrier import BatchChange
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.sinks.csv_sink import CsvSink
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from evenstride.runtime.telemetry.summary import Summary, summarise
from evenstride.trace.codec import TraceWriter

STEPS, BATCH, FIXED_S, PER_SAMPLE_S = 240, 96, 0.002, 0.001


@dataclass(frozen=True)
class Case:
    """What happens in a run.

    Args:
        policy: that decides.
        speeds: of the workers.
        later: their speeds from the middle on.
        noise: standard deviation of own work, as a part of it.
        jitter_s: that a worker is early or late by in the end of a step, at most.
        communication_s: of the first step.
        grows: how many times as long communication is in the last one.
        tail: every so many-th step is the last of an epoch, and smaller; 0 for none.
        lags: whether a worker tells the leader of half its steps one exchange later.
        turns_to: global batch that the second half is trained with.
    """

    policy: str = "adaptive"
    speeds: tuple[float, ...] = (1.0, 0.5, 0.3)
    later: tuple[float, ...] = ()
    noise: float = 0.03
    jitter_s: float = 0.0
    communication_s: float = 0.003
    grows: float = 1.0
    tail: int = 0
    lags: bool = False
    turns_to: int = 0


CASES = {
    "steady": Case(),
    "equal split": Case("uniform"),
    "published policy": Case("dynamic-batching", noise=0.1),
    "wrong shares": Case("static:16,32,48", speeds=(1.0, 0.5, 0.25)),
    "jitter": Case("static:48,24,24", jitter_s=0.002),
    "communication grows": Case(grows=8.0),
    "communication shrinks": Case("uniform", communication_s=0.1, grows=0.05, jitter_s=0.001),
    "small last steps": Case(tail=7),
    "reports lag": Case(lags=True, grows=3.0),
    "another batch": Case(turns_to=160, grows=3.0),
    "another speed": Case(later=(0.2, 0.5, 1.0), jitter_s=0.001, tail=30),
    "one worker": Case(speeds=(1.0,)),
}


class Driven:
    """Trains with a real leader, on workers whose times are made up; it writes its own trace.

    Args:
        folder: for trace and numbers.
        case: what happens.
    """

    def __init__(self, folder: Path, case: Case) -> None:
        self.case, self.folder, self.step = case, folder, 0
        self.leader = Leader(Control(policy_from_spec(case.policy)))
        self.leader.board = TelemetryBoard({"csv": CsvSink(folder / "metrics.csv")})
        names = (Worker(f"host/{rank}") for rank in range(len(case.speeds)))
        verdict = self.leader.form(FleetFormed(0, 0, BATCH, tuple(names)))
        header = {"policy": case.policy, "sync": "bsp", "started_unix_s": 1.7e9}
        self.leader.record_to(TraceWriter(folder / "trace.jsonl", header))
        assert verdict.shares is not None
        self._schedule = Schedule.opening(verdict.shares)
        self._rng = np.random.default_rng(0)
        self._ends_s = np.zeros(len(case.speeds))  # of the step before, on each worker's clock
        self.clock_s, self._unsent = 0.0, list[list[Observation]]([[] for _ in case.speeds])

    def run(self) -> Summary:
        """Train all steps, and return what the leader sums up."""
        while self.step < STEPS:
            half = STEPS // 2 if self.step < STEPS // 2 else STEPS
            due = min(max(self.leader.exchange_at, self.step + 1), half, self.step + 40)
            while self.step < due:
                self._train()
            self._exchange(turns=bool(self.case.turns_to) and self.step == STEPS // 2)
        replies = [Reply(STEPS, 0, (), Measurements.of(text)) for text in self._unsent]
        self.leader.take_last(STEPS, replies, None)
        summary = summarise(
            self.leader,
            rank=0,
            epoch=0,
            step=STEPS,
            global_batch=BATCH,
            policy=self.case.policy,
            samples_dropped=0,
            overhead_s=0.0,
        )
        self.leader.close(summary.to_dict())
        return summary

    def _train(self) -> None:
        case, step = self.case, self.step
        speeds = case.later if case.later and step >= STEPS // 2 else case.speeds
        shares = np.array(self._schedule.shares_at(step))
        if case.tail and step % case.tail == case.tail - 1:
            shares = np.maximum(shares // 3, 1)
        scatter = 1.0 + case.noise * np.abs(self._rng.standard_normal(len(shares)))
        busy_s = (FIXED_S + PER_SAMPLE_S * shares) / np.array(speeds) * scatter
        communication_s = case.communication_s * case.grows ** (step / STEPS)
        self.clock_s += float(busy_s.max()) + communication_s
        ends_s = self.clock_s + case.jitter_s * self._rng.random(len(shares))
        wait_s = np.maximum(ends_s - self._ends_s - busy_s, 0.0)
        self._ends_s = ends_s
        for rank, text in enumerate(self._unsent):
            one = ((float(busy_s[rank]),), (float(wait_s[rank]),))
            text.append(Observation(rank, int(shares[rank]), step, *one, modelled=step > 0))
        self.step += 1

    def _exchange(self, *, turns: bool) -> None:
        turn = BatchChange(self.step, self.case.turns_to, 10_000) if turns else None
        replies = []
        for rank, text in enumerate(self._unsent):
            count = len(text) // 2 if self.case.lags and rank == 1 else len(text)
            seen = Measurements.of(joined(text[:count]))
            self._unsent[rank] = text[count:]
            replies.append(Reply(self.step, 0, (), seen, drawn=self.step, turn=turn))
        verdict = self.leader.exchange(self.step, replies, 0)
        self.leader.finish_exchange()
        if verdict.shares is not None:
            self._schedule = self._schedule.replaced_from(verdict.effective, verdict.shares)


def joined(text: list[Observation]) -> Iterator[Observation]:
    """Yield single steps as ranks tell them: those of one share together."""
    for _, group in groupby(text, key=lambda one: (one.share, one.modelled)):
        first, *more = group
        busy_s = (first.busy_s[0], *(one.busy_s[0] for one in more))
        wait_s = (first.wait_s[0], *(one.wait_s[0] for one in more))
        shape = (first.worker, first.share, first.first_step)
        yield Observation(*shape, busy_s, wait_s, modelled=first.modelled)


@pytest.mark.parametrize("name", CASES)
def test_the_runs_own_figures_are_those_of_the_report(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path, CASES[name])
    summary = driven.run()
    story = RunTimeline(tmp_path)
    story.read()
    totals = totals_of(story.generations)

    assert story.unread == ()
    assert totals.steps == driven.leader.ledger.steps == STEPS
    assert totals.judged_steps == driven.leader.ledger.judged_steps > STEPS / 2
    assert summary.speedup_model is not None
    assert summary.step_s == pytest.approx(totals.took_s / STEPS, rel=1e-9)
    for figure in ("speedup_model", "efficiency_model", "bound_model"):
        assert getattr(totals, figure) == pytest.approx(getattr(summary, figure), rel=1e-9)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        text = {row["metric"]: float(row["value"]) for row in csv.DictReader(file)}
    for figure in ("speedup", "efficiency", "bound"):
        mine = getattr(summary, f"{figure}_model")
        assert text[f"{figure}_model_ratio"] == pytest.approx(mine, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_taken_saved_and_times_as_fast_fit_together(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path, CASES[name])
    driven.run()
    story = RunTimeline(tmp_path)
    story.read()
    totals = totals_of(story.generations)
    taken_s = sum(float(durations_s(one)[one.judged].sum()) for one in story.generations)
    assert totals.saved_s is not None

    assert taken_s == pytest.approx(totals.judged_s)
    assert totals.speedup_model == pytest.approx((taken_s + totals.saved_s) / taken_s)
    assert totals.took_s == pytest.approx(driven.clock_s, rel=1e-3), "the clock's, jitter or not"


@pytest.mark.parametrize("each", [1, 9])
@pytest.mark.parametrize("name", CASES)
def test_lines_of_splits_lie_as_far_apart_as_is_saved(tmp_path: Path, name: str, each: int) -> None:
    Driven(tmp_path, CASES[name]).run()
    story = RunTimeline(tmp_path)
    story.read()
    run = run_of(story, "run")
    ranks = tuple(range(len(run.lanes)))
    legs = tuple(Leg(one, 0.0, ranks, each) for one in story.generations)
    drawn = step_times(replace(run, legs=legs))
    sizes = np.concatenate([leg.last - leg.first + 1 for leg in legs])
    known = ~np.isnan(drawn.best)

    assert known.any()
    assert (np.isnan(drawn.equal) == ~known).all()
    assert (drawn.best <= drawn.mean + 1e-12)[known].all(), "nothing beats the best split"
    for split_s, of_split_s in (
        (drawn.equal, run.totals.equal_s),
        (drawn.best, run.totals.best_s),
    ):
        more_s = ((split_s - drawn.mean) * sizes)[known].sum()
        assert more_s == pytest.approx(of_split_s - run.totals.judged_s, abs=1e-9)
