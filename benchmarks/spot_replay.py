"""Replay a training on recorded spot machines, with several ways of handling losses.

A loss happens at a tick of the recording, without notice. A step takes the time of the best split
over the machines that train, by the function that training itself uses. The replay neglects noise,
the time to find the best split, the time to notice a loss, and the shorter last step. A machine
trains from the first tick at which it was up. Its boot time is not part of a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.reliability.checkpoint_interval import (
    Observed,
    Saving,
    expected_losses,
    next_save_in_s,
)
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import ScenarioError
from evenstride.sim.scenario.recordings import Machines
from evenstride.sim.scenario.scenario_model import Communication

_ROUNDING = 1e-9  # relative to a tick or a step


@dataclass(frozen=True, slots=True)
class SpotJob:
    """The training job.

    Args:
        samples: Samples to commit, once each.
        global_batch: Samples per step, with any machines.
        fixed_s: Fixed time of a step, for the machine in each slot.
        per_sample_s: Time per sample, for the machine in each slot, above 0.
        size: Number of machines of a way that cannot change it.
        save_s: Time of a save, during which no machine trains.
        restart_s: Time from a loss until processes train again, on machines that are present.
        regroup_s: The same for survivors that continue without a restart.
        communication: Communication of each step.
    """

    samples: int
    global_batch: int
    fixed_s: tuple[float, ...]
    per_sample_s: tuple[float, ...]
    size: int
    save_s: float = 10.0
    restart_s: float = 60.0
    regroup_s: float = 2.0
    communication: Communication = Communication()  # noqa: RUF009 - it is frozen

    def step_s(self, slots: IntArray) -> float:
        """Return the time of a step on the machines in some slots, at the best split."""
        fixed_s, per_sample_s = np.array(self.fixed_s)[slots], np.array(self.per_sample_s)[slots]
        times = TimeModel.affine(fixed_s, per_sample_s)
        fewest = np.full(len(slots), min(1, self.global_batch // len(slots)))
        most = np.full(len(slots), self.global_batch)
        shares = equal_finish(times, fewest, most, self.global_batch)
        return times.makespan_s(shares) + self.communication.step_s(len(slots))


@dataclass(frozen=True, slots=True)
class Way:
    """A way of handling losses.

    Args:
        name: Name in tables.
        elastic: Whether it trains on all present machines, at least one. Otherwise it trains on
            exactly ``size`` machines.
        memory: Whether survivors keep the committed steps. Otherwise training falls back to the
            last save. An elastic way with memory continues without a restart, and new machines join
            at once. Without memory they join after the next save.
        saving: Seconds of training between saves, a rule, or ``None`` for no saves.
    """

    name: str
    elastic: bool
    memory: bool
    saving: float | Saving | None

    @property
    def live(self) -> bool:
        """Whether survivors continue without a restart."""
        return self.elastic and self.memory


SCRATCH = Way("restart from scratch", elastic=False, memory=False, saving=None)
WAIT = Way("stop and wait for all", elastic=False, memory=True, saving=None)
FIXED = Way("save every 30 min", elastic=False, memory=False, saving=1800.0)
ELASTIC = Way("elastic, saves as learnt", elastic=True, memory=False, saving=Saving())
LIVE = Way("live, saves as learnt", elastic=True, memory=True, saving=Saving())


@dataclass(frozen=True, slots=True)
class SpotOutcome:
    """The outcome of a job.

    Args:
        way: Name of the way.
        finished: Whether the job finished before the end of the recording.
        committed: Samples in the committed trajectory, each once.
        recomputed: Samples that were committed and lost, and must be trained again.
        interrupted: Samples of steps that a loss interrupted, so that they were started twice.
        lost: Samples that are missing in the trajectory; always 0.
        losses: Machines lost during training.
        saves: Number of saves.
        restarts: Number of starts of processes, including the first.
        train_s: Time in steps, including lost ones.
        save_s: Time in saves.
        restart_s: Time in restarts and regrouping.
        wait_s: Time without enough machines.
        machine_s: Machine-seconds of all machines that were up, or of as many as the way can use.
    """

    way: str
    finished: bool
    committed: int
    recomputed: int
    interrupted: int
    lost: int
    losses: int
    saves: int
    restarts: int
    train_s: float
    save_s: float
    restart_s: float
    wait_s: float
    machine_s: float

    @property
    def total_s(self) -> float:
        """Time from the first tick to the end of the job or the recording."""
        return self.train_s + self.save_s + self.restart_s + self.wait_s


def replay(recorded: Machines, job: SpotJob, ways: Sequence[Way]) -> tuple[SpotOutcome, ...]:
    """Replay a job on recorded machines in several ways.

    Raises:
        ScenarioError: The job does not fit the recording.
    """
    slots = recorded.who.shape[1]
    if not 1 <= job.size <= slots or min(len(job.fixed_s), len(job.per_sample_s)) < slots:
        raise ScenarioError(
            f"invalid job for a recording of {slots} machines: size {job.size} must be between 1 "
            f"and {slots}, and {len(job.fixed_s)} fixed times and {len(job.per_sample_s)} times "
            "per sample must cover all machines"
        )
    if min(job.samples, job.global_batch) < 1 or min(job.per_sample_s) <= 0.0:
        raise ScenarioError(
            f"invalid job of {job.samples} samples, {job.global_batch} per step: expected at least "
            "1 of both, and a time per sample above 0"
        )
    return tuple(_SpotRun(recorded, job, way).run() for way in ways)


class _SpotRun:
    """One job in one way. Its clock advances from event to event."""

    def __init__(self, recorded: Machines, job: SpotJob, way: Way) -> None:
        self._recorded, self._job, self._way = recorded, job, way
        self._up = (recorded.who >= 0).sum(axis=1)
        self._arrivals_s = np.unique(recorded.came) * recorded.gap_s
        self._end_s = len(recorded.who) * recorded.gap_s
        self._now_s = 0.0
        self._members = np.zeros(0, dtype=np.int64)
        self._keepers = self._members  # machines that hold the last committed state
        self._windows: list[tuple[int, int]] = []
        self._done = self._saved = 0
        self._due_s = inf  # time of the next save
        self._observed, self._marked_s = Observed(), 0.0
        self._recomputed = self._interrupted = self._losses = self._saves = self._restarts = 0
        self._spent_s = dict.fromkeys(("train", "save", "restart", "wait"), 0.0)
        self._steps_s: dict[bytes, float] = {}

    def run(self) -> SpotOutcome:
        """Train until the job or the recording ends."""
        while self._done < self._job.samples and self._form():
            while len(self._members) and self._done < self._job.samples:
                self._train()
        self._check_trajectory()
        held = self._up if self._way.elastic else np.minimum(self._up, self._job.size)
        ticks = np.arange(len(held)) * self._recorded.gap_s
        part = np.clip(self._now_s - ticks, 0.0, self._recorded.gap_s)
        return SpotOutcome(
            way=self._way.name,
            finished=self._done >= self._job.samples,
            committed=self._done,
            recomputed=self._recomputed,
            interrupted=self._interrupted,
            lost=self._done - sum(last - first for first, last in self._windows),
            losses=self._losses,
            saves=self._saves,
            restarts=self._restarts,
            train_s=self._spent_s["train"],
            save_s=self._spent_s["save"],
            restart_s=self._spent_s["restart"],
            wait_s=self._spent_s["wait"],
            machine_s=float((held * part).sum()),
        )

    def _form(self) -> bool:
        """Wait for enough machines and start on them. Return ``False`` if they never come."""
        need = 1 if self._way.elastic else self._job.size
        tick = self._tick()
        enough = np.flatnonzero(self._up[tick:] >= need)
        at_s = float(tick + enough[0]) * self._recorded.gap_s if len(enough) else self._end_s
        if at_s > self._now_s:
            self._spent_s["wait"] += at_s - self._now_s
            self._now_s = at_s
        if not len(enough):
            return False
        if not (self._recorded.gone[self._keepers] > self._tick()).any():
            self._fall_back()
        self._take_in(self._job.restart_s)
        return True

    def _take_in(self, restart_s: float) -> None:
        """Start on the present machines, or as many as the way uses, present members first."""
        self._mark()
        here = self._here()
        order = np.lexsort((self._recorded.slot[here], ~np.isin(here, self._keepers)))
        self._members = here[order][: len(here) if self._way.elastic else self._job.size]
        self._restarts += 1
        if self._spend(restart_s, "restart"):
            self._keepers = self._members
            if self._due_s == inf or not self._way.live:
                self._plan_save()

    def _train(self) -> None:
        """Train until the next event, which is a save, a loss or a new machine, and handle it."""
        step_s, job = self._step_s(), self._job
        left = -(-(job.samples - self._done) // job.global_batch)
        until_s = min(self._loss_s(), self._newcomer_s() if self._way.live else inf)
        due = (self._due_s - self._now_s) / step_s + _ROUNDING
        wanted = inf if due == inf else max(1, floor(due))
        fitting = floor((until_s - self._now_s) / step_s + _ROUNDING)
        steps = int(min(left, wanted, fitting))
        self._commit(steps)
        self._spent_s["train"] += steps * step_s
        self._now_s += steps * step_s
        if steps == left:
            return
        if steps == fitting and self._loss_s() - self._now_s < step_s * (1.0 - _ROUNDING):
            self._spend(inf, "train")
            self._interrupted += job.global_batch if self._now_s < self._end_s else 0
        elif self._way.live and self._newcomer_s() <= self._now_s + step_s:
            self._join(step_s)
        else:
            self._save()

    def _join(self, step_s: float) -> None:
        """Add new machines at the end of the step in which they arrive."""
        if self._now_s < self._newcomer_s():
            self._spend(step_s, "train")  # no loss happens before its end
            self._commit(1)
        if self._done < self._job.samples:
            self._take_in(self._job.regroup_s)

    def _save(self) -> None:
        if not self._spend(self._job.save_s, "save"):
            return
        self._saved = self._done
        self._saves += 1
        self._plan_save()
        if self._way.elastic and not self._way.memory and self._newcomer_s() <= self._now_s:
            self._take_in(self._job.restart_s)

    def _plan_save(self) -> None:
        self._mark()
        match self._way.saving:
            case Saving() as saving:
                decided = next_save_in_s(self._job.save_s, self._ages_s(), self._observed, saving)
                self._due_s = self._now_s + decided.in_s
            case None:
                self._due_s = inf
            case every_s:
                self._due_s = self._now_s + every_s

    def _spend(self, span_s: float, what: str) -> bool:
        """Advance the clock. Return ``False`` if a member is lost before the end."""
        loss_s = self._loss_s()
        until_s = min(self._now_s + span_s, loss_s)
        self._spent_s[what] += until_s - self._now_s
        self._now_s = until_s
        if loss_s > until_s:
            return True
        self._mark()
        if self._now_s < self._end_s:
            self._lose()
        else:
            self._members = self._members[:0]
        return False

    def _lose(self) -> None:
        """Continue without the lost members, or stop."""
        left = self._members[self._recorded.gone[self._members] > self._tick()]
        gone = len(self._members) - len(left)
        self._losses += gone
        seen = self._observed
        self._observed = Observed(seen.failures + gone, seen.expected)
        self._members = left if self._way.live else self._members[:0]
        if not self._way.memory:
            self._keepers = self._members
        if len(self._members):
            self._take_in(self._job.regroup_s)

    def _mark(self) -> None:
        """Count the expected losses since the last call."""
        if isinstance(self._way.saving, Saving):
            ages_s = self._ages_s()
            before_s = np.maximum(ages_s - (self._now_s - self._marked_s), 0.0)
            more = expected_losses(self._way.saving.lifetime, before_s, ages_s)
            seen = self._observed
            # A model that rules out such an age is wrong. Its infinite expectation does not count.
            self._observed = Observed(seen.failures, seen.expected + (more if more < inf else 0.0))
        self._marked_s = self._now_s

    def _commit(self, steps: int) -> None:
        after = min(self._done + steps * self._job.global_batch, self._job.samples)
        if after > self._done:
            self._windows.append((self._done, after))
        self._done = after

    def _fall_back(self) -> None:
        """Drop the steps that were committed after the last save."""
        self._recomputed += self._done - self._saved
        self._done, self._due_s = self._saved, inf
        self._windows = [window for window in self._windows if window[1] <= self._saved]

    def _check_trajectory(self) -> None:
        """Assert that the trajectory has every sample once."""
        firsts = [0, *(last for _, last in self._windows)]
        assert firsts == [*(first for first, _ in self._windows), self._done], "not exactly once"

    def _tick(self) -> int:
        return floor(self._now_s / self._recorded.gap_s + _ROUNDING)

    def _here(self) -> IntArray:
        row = self._recorded.who[min(self._tick(), len(self._recorded.who) - 1)]
        return np.asarray(row[row >= 0])

    def _ages_s(self) -> FloatArray:
        came_s = self._recorded.came[self._members] * self._recorded.gap_s
        return np.asarray(np.maximum(self._now_s - came_s, 0.0))

    def _loss_s(self) -> float:
        """Return the time of the next loss of a member, or the end of the recording."""
        return float(self._recorded.gone[self._members].min()) * self._recorded.gap_s

    def _newcomer_s(self) -> float:
        """Return the time from which a machine is present that does not train yet."""
        if len(np.setdiff1d(self._here(), self._members)):
            return self._now_s
        later = np.searchsorted(self._arrivals_s, self._now_s + _ROUNDING, side="right")
        return float(self._arrivals_s[later]) if later < len(self._arrivals_s) else inf

    def _step_s(self) -> float:
        slots = np.sort(self._recorded.slot[self._members])
        if (key := slots.tobytes()) not in self._steps_s:
            self._steps_s[key] = self._job.step_s(slots)
        return self._steps_s[key]
