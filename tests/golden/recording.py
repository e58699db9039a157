"""Runs of the real control on workers that follow a script, kept as traces next to this file.

``python -m tests.golden.recording`` makes them again. Do so only when decisions are meant to
change, and read the difference before keeping it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Event,
    ExchangeAfter,
    Exchanged,
    FleetFormed,
    Instruction,
    OpeningSkipped,
    SetShares,
)
from evenstride.core.control.schedule import Schedule
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.sampling.partition import step_shares
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.trace.codec import TraceWriter

HERE = Path(__file__).parent
COMMUNICATION_S = 0.004
# Steps of an epoch; its first is not modelled, its last is a tail that leaves workers out.
EPOCH_STEPS, TAIL = 30, 2


@dataclass(frozen=True)
class Story:
    """What happens to a fleet.

    Args:
        spec: of the policy.
        batch: samples per step.
        workers: in rank order.
        fixed_s: per worker, seconds of a step whatever its share.
        per_sample_s: per worker.
        slowed: from a step on, by how much each worker is slower than at first.
        spikes: (step, worker) that takes three times as long, once.
        noise: largest deviation of a time, as a part of it.
        exchanges: how many are recorded.
        skips_opening: whether the opening phase is skipped.
    """

    spec: str
    batch: int
    workers: tuple[Worker, ...]
    fixed_s: tuple[float, ...]
    per_sample_s: tuple[float, ...]
    slowed: tuple[tuple[int, tuple[float, ...]], ...] = ()
    spikes: tuple[tuple[int, int], ...] = ()
    noise: float = 0.02
    exchanges: int = 16
    skips_opening: bool = False

    def busy_s(self, step: int, worker: int, share: int, chance: float) -> float:
        """Return how long the worker works in a step."""
        factor = 1.0
        for start, factors in self.slowed:
            factor = factors[worker] if step >= start else factor
        factor *= 3.0 if (step, worker) in self.spikes else 1.0
        usual_s = self.fixed_s[worker] + self.per_sample_s[worker] * share
        return round(usual_s * factor * (1.0 + self.noise * chance), 7)


STORIES = {
    "adaptive": Story(
        spec="adaptive",
        batch=120,
        workers=(Worker("one/0"), Worker("one/1", max_share=70), Worker("two/2", min_share=4)),
        fixed_s=(0.02, 0.01, 0.03),
        per_sample_s=(0.002, 0.004, 0.003),
        slowed=((40, (1.0, 1.0, 2.5)), (120, (1.0, 1.0, 1.0))),
        spikes=((75, 0),),
        exchanges=24,
    ),
    "adaptive-cold": Story(
        spec="adaptive",
        batch=33,
        workers=(Worker("one/0"), Worker("one/1")),
        fixed_s=(0.05, 0.0),
        per_sample_s=(0.01, 0.02),
        exchanges=8,
        skips_opening=True,
    ),
    "dynamic-batching": Story(
        spec="dynamic-batching",
        batch=960,
        workers=(
            Worker("one/0", cores=4.0, flops_per_s=1e9),
            Worker("one/1", cores=2.0, flops_per_s=1e9),
            Worker("two/2", cores=1.0, flops_per_s=5e8),
        ),
        fixed_s=(0.03, 0.0, 0.01),
        per_sample_s=(0.0004, 0.0004, 0.0016),
        slowed=((50, (1.0, 2.0, 1.0)),),
        noise=0.2,
    ),
    "static": Story(
        spec="static:8,0,24",
        batch=32,
        workers=(Worker("one/0"), Worker("one/1"), Worker("two/2")),
        fixed_s=(0.01, 0.01, 0.01),
        per_sample_s=(0.01, 0.01, 0.01),
        exchanges=4,
    ),
}


@dataclass
class Run:
    """A run while it is recorded."""

    story: Story
    writer: TraceWriter
    control: Control
    schedule: Schedule = field(default_factory=lambda: Schedule(()))
    random: random.Random = field(default_factory=lambda: random.Random(20))
    step: int = 0
    at_s: float = 0.0

    def tell(self) -> None:
        """Form the fleet, then train and exchange as the control asks for it."""
        story = self.story
        after = self.put(FleetFormed(0, 0, story.batch, story.workers))
        if story.skips_opening:
            after = self.put(OpeningSkipped(0))
        for _ in range(story.exchanges):
            first, self.step = self.step, self.step + after.steps
            seen = self.train(range(first, self.step))
            after = self.put(
                Exchanged(self.step, self.step + 2 - after.blocking, Measurements.of(seen))
            )
        self.writer.record("ended", at_s=round(self.at_s, 6), summary={"step": self.step})

    def put(self, event: Event) -> ExchangeAfter:
        """Record an event with what the control answers, and return when to exchange next."""
        self.control, instructions = advance(self.control, event)
        self.writer.event(self.at_s, event, instructions)
        for instruction in instructions:
            if isinstance(instruction, SetShares):
                self.schedule = self.schedule.decided(instruction.effective, instruction.shares)
        return _after(tuple(instructions))

    def train(self, steps: range) -> tuple[Observation, ...]:
        """Return what the workers measure in some steps."""
        seen: list[list[Observation]] = [[] for _ in self.story.workers]
        for step in steps:
            shares = self.schedule.shares_at(step)
            if step % EPOCH_STEPS == EPOCH_STEPS - 1:
                shares = step_shares(shares, TAIL)
            busy_s = [
                self.story.busy_s(step, worker, share, 2 * self.random.random() - 1)
                for worker, share in enumerate(shares)
            ]
            for worker, share in enumerate(shares):
                wait_s = round(max(busy_s) - busy_s[worker] + COMMUNICATION_S, 7)
                modelled = share > 0 and step % EPOCH_STEPS > 0
                times = (busy_s[worker],), (wait_s,)
                seen[worker].append(Observation(worker, share, step, *times, modelled=modelled))
            self.at_s += max(busy_s) + COMMUNICATION_S
        return tuple(run for reported in seen for run in _runs(reported))


def record(name: str, path: Path) -> None:
    """Write the trace of a story."""
    story = STORIES[name]
    path.unlink(missing_ok=True)
    with TraceWriter(path, {"policy": story.spec, "global_batch": story.batch}) as writer:
        Run(story, writer, Control(policy_from_spec(story.spec))).tell()


def _after(instructions: tuple[Instruction, ...]) -> ExchangeAfter:
    (after,) = (i for i in instructions if isinstance(i, ExchangeAfter))
    return after


def _runs(reported: list[Observation]) -> list[Observation]:
    """Join consecutive steps of one share, as ranks report them."""
    runs = []
    for _, alike in groupby(reported, key=lambda seen: (seen.share, seen.modelled)):
        run = list(alike)
        busy_s, wait_s = tuple(o.busy_s[0] for o in run), tuple(o.wait_s[0] for o in run)
        runs.append(replace(run[0], busy_s=busy_s, wait_s=wait_s))
    return runs


if __name__ == "__main__":
    for each in STORIES:
        record(each, HERE / f"{each}.jsonl")
