"""Scripted faults, and which workers continue after each, for simulated and for real runs.

A plan gives the times of faults and arrivals in committed global steps. So it needs no clock, and
means the same on every machine. A *generation* is the time from one start of the workers to the end
of their process group. All workers of a generation end together, because a group cannot lose or
gain a rank. The next generation continues from the newest complete checkpoint.

`ScriptedRoster` decides which workers are in the next generation. Both the simulation of a plan and
the `supervisor` of real processes use it, and both must produce the same generations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from evenstride.core.membership.member_table import Happening, Membership, MembershipEvent
from evenstride.errors import ConfigError
from evenstride.sim.scenario.scenario_events import (
    MOST_STEPS,
    Length,
    Name,
    Part,
    Step,
    refuse,
    shown,
)

Kind = Literal["kill", "term", "stop", "raise", "disk-full", "corrupt-newest", "crash-in-save"]

_SAVING = ("disk-full", "crash-in-save")
_GOES_ON = "disk-full"  # the only kind that does not end a generation
NEVER = MOST_STEPS + 1
"""Step of return of a worker that never returns."""

END = "end"
"""The cause of the end of the last generation."""


def _once(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            refuse(f"{shown(names)} names {shown(name)} twice (allowed: each once)")


class Fault(Part):
    """A fault of some workers at a number of committed steps; it happens once."""

    at: Step = Field(description="committed steps of the run when it happens")
    workers: list[Name] | Literal["leader"] = Field(
        default="leader", description="affected workers: names, or leader for the one of rank 0"
    )
    kind: Kind = Field(
        description="kill: SIGKILL; term: SIGTERM, a notice to leave; stop: SIGSTOP, a hang; "
        "raise: an exception; disk-full: the save fails, no space left; corrupt-newest: the "
        "newest checkpoint is damaged, then SIGKILL; crash-in-save: SIGKILL before one of its "
        "writes"
    )
    back: Literal["now", "never"] | Step = Field(
        default="now",
        description="when they may return: with the next generation, never, or from a step on",
    )
    write: int | None = Field(
        default=None, ge=1, description="crash-in-save: number of the write that does not happen"
    )
    completes: bool = Field(
        default=False, description="crash-in-save: whether the checkpoint is complete before it"
    )
    restart: bool = Field(
        default=False,
        description="whether it happens during the start of the first generation after these "
        "steps, before its first step",
    )

    @field_validator("back", mode="before")
    @classmethod
    def _when(cls, value: Any) -> Any:
        if value not in ("now", "never") and not (type(value) is int and 0 <= value <= MOST_STEPS):
            refuse(f"{shown(value)} (allowed: now, never, or a step)")
        return value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if isinstance(self.workers, list):
            if not self.workers:
                refuse("it is empty (allowed: at least one name, or leader)", "workers")
            _once(self.workers)
        if (self.write is not None) != (self.kind == "crash-in-save"):
            refuse("a write is given for crash-in-save, and only for it", "write")
        if self.completes and self.kind != "crash-in-save":
            refuse("only a crash-in-save may complete its checkpoint", "completes")
        if self.restart and self.kind not in ("kill", "raise", "stop"):
            refuse(f"{self.kind} needs a running loop (allowed: kill, raise, stop)", "kind")
        return self

    @property
    def may_return(self) -> int:
        """The committed step from which its workers may return."""
        return {"now": 0, "never": NEVER}[self.back] if isinstance(self.back, str) else self.back


class Arrival(Part):
    """Workers that join at a number of committed steps, instead of at the start."""

    at: Step = Field(description="committed steps of the run when they join")
    workers: list[Name] = Field(min_length=1, description="their names")


class FaultPlan(Part):
    """The workers, the steps and the faults of a run."""

    workers: list[Name] = Field(min_length=1, description="workers at the start, by rank")
    steps: Length = Field(description="steps of the whole run")
    save_every: Length = Field(description="steps from one checkpoint to the next")
    faults: list[Fault] = Field(default=[], description="faults, in any order")
    joins: list[Arrival] = Field(default=[], description="workers that join later")
    restarts: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=1000, description="most generations after the first"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        later = [name for arrival in self.joins for name in arrival.workers]
        _once([*self.workers, *later])
        known = {*self.workers, *later}
        for number, fault in enumerate(self.faults):
            self._check(fault, known, number)
        for number, arrival in enumerate(self.joins):
            if not 0 < arrival.at < self.steps:
                refuse(f"{arrival.at} (allowed: 1 to {self.steps - 1})", "joins", number, "at")
        return self

    def _check(self, fault: Fault, known: set[str], number: int) -> None:
        place = ("faults", number)
        strange = set() if fault.workers == "leader" else set(fault.workers) - known
        if strange:
            there = ", ".join(sorted(known))
            refuse(f"no worker has the name {shown(min(strange))} (allowed: {there})", *place)
        if fault.at >= self.steps:
            refuse(f"{fault.at} (allowed: 0 to {self.steps - 1})", *place, "at")
        if fault.kind in _SAVING and (fault.at == 0 or fault.at % self.save_every):
            refuse(
                f"{fault.kind} at {fault.at} (allowed: a step that is saved, a multiple of "
                f"{self.save_every})",
                *place,
                "at",
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a run.

    Args:
        number: from 0 on.
        first_step: committed steps at its start.
        last_step: committed steps at its end.
        members: names of its workers, by rank.
        ended_by: ``kill b``, ``join d``, several of them, or ``end``.
    """

    number: int
    first_step: int
    last_step: int
    members: tuple[str, ...]
    ended_by: str


@dataclass(frozen=True, slots=True)
class ScriptedRoster:
    """The workers of a generation, and those that may join later."""

    members: tuple[str, ...]  # names, by rank
    # The other workers, each with the committed step from which it may join.
    absent: tuple[tuple[str, int], ...] = ()

    @classmethod
    def opening(cls, plan: FaultPlan) -> ScriptedRoster:
        """Return the roster of a plan's first generation."""
        later = [(name, arrival.at) for arrival in plan.joins for name in arrival.workers]
        return cls(tuple(plan.workers), tuple(later))

    def victims(self, fault: Fault) -> tuple[str, ...]:
        """Return the members that a fault affects."""
        named = self.members[:1] if fault.workers == "leader" else fault.workers
        return tuple(name for name in self.members if name in named)

    def coming(self, reached: int) -> tuple[str, ...]:
        """Return the absent workers that may join once ``reached`` steps are committed."""
        return tuple(name for name, step in self.absent if step <= reached)

    def arrivals(self, first: int) -> tuple[int, ...]:
        """Return the steps above ``first`` at which a worker may join, in order."""
        return tuple(sorted({step for _, step in self.absent if first < step < NEVER}))

    def after(self, faults: Iterable[Fault], reached: int) -> ScriptedRoster:
        """Return the roster of the next generation.

        Survivors come first, in their order, so that one of them is the new leader. Workers that
        join follow, and workers that were just lost are last.

        Raises:
            ConfigError: no worker is left.
        """
        happened: list[Happening] = []
        lost: dict[str, int] = {}
        for fault in faults:
            for name in self.victims(fault) if fault.kind != _GOES_ON else ():
                happened += _happenings(fault, name) if name not in lost else []
                lost[name] = max(lost.get(name, 0), fault.may_return)
        away = replace(self, absent=(*self.absent, *lost.items()))
        come = away.coming(reached)
        for name in come:
            happened += [
                Happening(name, MembershipEvent.JOIN),
                Happening(name, MembershipEvent.READY),
            ]
        before = Membership.formed(0, self.members)
        members = before.after_all(tuple(happened))[0].workers
        if not members:
            raise ConfigError(
                f"none of the workers {', '.join(self.members)} is left at step {reached}, and "
                "none may join before a later step; let one of them return now, or let another "
                "one join"
            )
        return ScriptedRoster(members, tuple(pair for pair in away.absent if pair[0] not in come))

    def ended_by(self, faults: Iterable[Fault], reached: int) -> str:
        """Return what ended this generation."""
        causes = [
            f"{fault.kind} {name}"
            for fault in faults
            if fault.kind != _GOES_ON
            for name in self.victims(fault)
        ]
        return ", ".join([*causes, *(f"join {name}" for name in self.coming(reached))])


def _happenings(fault: Fault, name: str) -> list[Happening]:
    """Return the membership events of a fault: a loss, or a leave after a notice."""
    if fault.kind == "term":
        return [Happening(name, MembershipEvent.NOTICE), Happening(name, MembershipEvent.LEAVE)]
    return [Happening(name, MembershipEvent.LOST)]


def happening(
    plan: FaultPlan, roster: ScriptedRoster, fired: Iterable[int], step: int
) -> tuple[tuple[int, Fault], ...]:
    """Return the faults, with their numbers, that affect a member at ``step``."""
    past = set(fired)
    return tuple(
        (number, fault)
        for number, fault in enumerate(plan.faults)
        if not fault.restart and fault.at == step and number not in past and roster.victims(fault)
    )


def at_restart(
    plan: FaultPlan, roster: ScriptedRoster, fired: Iterable[int], reached: int
) -> tuple[tuple[int, Fault], ...]:
    """Return the faults, with their numbers, that affect a member of a starting generation."""
    past = set(fired)
    return tuple(
        (number, fault)
        for number, fault in enumerate(plan.faults)
        if fault.restart and fault.at <= reached and number not in past and roster.victims(fault)
    )


@dataclass
class _SimulatedRun:
    """The state of a simulated run."""

    plan: FaultPlan
    left_at: Mapping[int, int]
    roster: ScriptedRoster
    reached: int = 0
    fired: set[int] = field(default_factory=set)
    saves: list[int] = field(default_factory=lambda: [0])

    def live(self, number: int) -> Generation:
        """Return the next generation, and advance to the one after it."""
        plan, roster, first = self.plan, self.roster, self.saves[-1]
        ending = at_restart(plan, roster, self.fired, self.reached) if number else ()
        step = first
        if not ending:
            ending = self._at(first, begins=True)
        while not ending and step < plan.steps and not (step > first and self._may_join()):
            step += 1
            self.reached = max(self.reached, step)
            ending = self._at(step)
        self.fired |= {index for index, _ in ending}
        if not ending and step == plan.steps:
            return Generation(number, first, step, roster.members, END)
        step = self._leave(ending, step)
        faults = [fault for _, fault in ending]
        self.roster = roster.after(faults, self.reached)
        why = roster.ended_by(faults, self.reached)
        return Generation(number, first, step, roster.members, why)

    def _may_join(self) -> bool:
        return bool(self.roster.coming(self.reached))

    def _at(self, step: int, *, begins: bool = False) -> tuple[tuple[int, Fault], ...]:
        """Save, and apply the faults of a step; return those that end the generation."""
        met = happening(self.plan, self.roster, self.fired, step)
        if begins:  # what is restored is not saved again
            met = tuple(pair for pair in met if pair[1].kind not in _SAVING)
        failed = any(f.kind in _SAVING and not f.completes for _, f in met)
        if step % self.plan.save_every == 0 and step > self.saves[-1] and not failed:
            self.saves.append(step)
        if any(fault.kind == "corrupt-newest" for _, fault in met) and len(self.saves) > 1:
            self.saves.pop()
        self.fired |= {index for index, fault in met if fault.kind == _GOES_ON}
        return tuple(pair for pair in met if pair[1].kind != _GOES_ON)

    def _leave(self, ending: tuple[tuple[int, Fault], ...], step: int) -> int:
        if not ending or any(fault.kind != "term" for _, fault in ending):
            return step
        leave = max(self.left_at.get(index, step) for index, _ in ending)
        leave = min(leave, self.plan.steps)
        self.reached = max(self.reached, leave)
        if leave > self.saves[-1]:
            self.saves.append(leave)
        return leave


def simulate_plan(plan: FaultPlan, left_at: Mapping[int, int] | None = None) -> list[Generation]:
    """Return the generations of a plan.

    Checkpoints are complete as soon as their step is committed. A new generation continues from the
    newest complete one. Only a worker that leaves after a notice takes a checkpoint just before.
    Faults between a notice and the leave are ignored.

    Args:
        plan: the workers, the steps and the faults.
        left_at: for faults of kind ``term``, by their number in the plan, the step of the
            checkpoint before the leave. The workers take some steps after the notice to agree on
            it, and only a real run knows how many. The step of the notice if not given.

    Raises:
        ConfigError: no worker is left, or the plan needs more restarts than it allows.

    Cost:
        Proportional to the steps trained, those trained again included.

    >>> plan = FaultPlan(workers=["a", "b"], steps=20, save_every=5, faults=[
    ...     Fault(at=12, workers=["b"], kind="kill", back=16)])
    >>> for one in simulate_plan(plan):
    ...     print(one.first_step, one.last_step, *one.members, "|", one.ended_by)
    0 12 a b | kill b
    10 16 a | join b
    15 20 a b | end
    """
    run = _SimulatedRun(plan, left_at or {}, ScriptedRoster.opening(plan))
    generations: list[Generation] = []
    while not generations or generations[-1].ended_by != END:
        if len(generations) > plan.restarts:
            raise ConfigError(
                f"the run is at step {run.saves[-1]} of {plan.steps} after {plan.restarts} "
                "restarts, the most that the plan allows; raise restarts"
            )
        generations.append(run.live(len(generations)))
    return generations


def steps_again(generations: Iterable[Generation]) -> int:
    """Return the number of steps trained again, because a generation began before the last end."""
    pairs = itertools.pairwise(generations)
    return sum(max(one.last_step - after.first_step, 0) for one, after in pairs)
