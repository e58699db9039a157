"""A simulated cluster and its events, as described by a file.

Names carry their unit. Every omitted field has the default shown here. ``evenstride simulate
--schema`` prints the JSON schema of `Scenario`.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationInfo, field_validator, model_validator

from evenstride.core.allocation.integer_splits import whole_lower
from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.errors import ConfigError, InfeasibleShares
from evenstride.sim.engine.network import ParameterServers, Ring
from evenstride.sim.scenario.scenario_events import (
    FASTEST,
    MOST_STEPS,
    MOST_WORKERS,
    SLOWEST,
    Event,
    Fraction,
    Join,
    Lag,
    Leave,
    Length,
    LoadReplay,
    Name,
    NoticeEvent,
    Part,
    Place,
    Rate,
    Resource,
    Samples,
    Seconds,
    SpeedStep,
    Walk,
    chosen,
    refuse,
    shown,
)

Mask = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # of sums of logarithms

MAY_BE_CUT = {"may be cut": True}
"""Context of a validation in which events may lie after the last step, and never occur."""


class WorkerGroup(Part):
    """Workers of one kind: ``t(b) = max(floor_s, fixed_s + b / samples_per_s)``.

    With ``wave`` the time follows a staircase, beyond ``saturates_at`` it rises faster, and beyond
    ``cliff_at`` it jumps.
    """

    name: Name = Field(
        default="worker", description="name of the workers; numbered if there are several"
    )
    count: int = Field(default=1, ge=1, le=MOST_WORKERS, description="number of these workers")
    samples_per_s: Rate = Field(
        description="samples per second, without the fixed time: 2000, not 2,000"
    )
    fixed_s: Seconds = Field(
        default=0.0, description="seconds of a step that do not depend on the share: 0.02 is 20 ms"
    )
    floor_s: Seconds = Field(
        default=0.0, description="shortest possible step in seconds: 0.02 is 20 ms"
    )
    saturates_at: Samples | None = Field(
        default=None,
        description="share in samples above which samples cost more; never if omitted",
    )
    beyond: float = Field(
        default=2.0,
        ge=1,
        le=1000,
        description="cost factor of each sample beyond saturates_at",
    )
    wave: Samples = Field(
        default=1,
        description="samples that are computed at once, as in a wave of a GPU: a share takes as "
        "long as the next multiple of it",
    )
    cliff_at: Samples | None = Field(
        default=None,
        description="share in samples beyond which the whole step is slower, for example without "
        "the cache; never if omitted",
    )
    cliff_factor: float = Field(
        default=5.0, ge=1, le=1000, description="factor of the time of a step beyond cliff_at"
    )
    min_share: Samples = Field(default=1, description="fewest samples in a step")
    max_share: Samples | None = Field(
        default=None,
        description="most samples in a step, for example by its memory; no limit if omitted",
    )
    quantum: Samples | None = Field(
        default=None,
        description="declared quantum: shares are multiples of this many samples; not declared if "
        "omitted",
    )
    noise: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="standard deviation of the logarithm of a step's time: 0.02 is 2 %",
    )
    noise_correlation: float = Field(
        default=0.0,
        ge=0,
        le=0.9999,
        description="correlation of the noise of one step with that of the next",
    )
    noise_tail: float | None = Field(
        default=None,
        ge=2.1,
        le=1000,
        description="degrees of freedom of Student's t, which the noise follows with the same "
        "standard deviation: 3 has heavy tails; normal if omitted",
    )
    noise_common: Fraction = Field(
        default=0.0,
        description="fraction of the noise's variance that all workers have in common",
    )
    spike_rate: Fraction = Field(
        default=0.0, description="fraction of the steps that are spikes: 0.01 is one in a hundred"
    )
    spike_factor: float = Field(
        default=3.0, ge=1, le=1000, description="factor by which a spike lengthens a step"
    )
    new_share_s: Seconds = Field(
        default=0.0,
        description="additional seconds of a worker's first step at each new share, as caused by "
        "compilers and autotuners: 0.5 is half a second",
    )
    handling_s: Seconds = Field(
        default=0.0,
        description="seconds to pack and unpack each update with parameter servers: 0.02 is 20 ms",
    )
    cores: Resource | None = Field(
        default=None, description="declared number of cores, for static policies"
    )
    flops_per_s: Resource | None = Field(
        default=None, description="declared FLOP/s, for static policies: 8.1e12 is 8.1 TFLOP/s"
    )

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_share is not None and self.max_share < self.min_share:
            refuse(
                f"{self.max_share} is below min_share (allowed: at least {self.min_share})",
                "max_share",
            )
        return self


class Communication(Part):
    """The links between the workers, and to parameter servers; independent of the split."""

    latency_s: Seconds = Field(default=0.0, description="seconds per message: 0.0001 is 0.1 ms")
    bytes_per_s: Annotated[float, Field(ge=1, le=1e18)] | None = Field(
        default=None, description="bytes per second of the slowest link; no limit if omitted"
    )
    gradient_bytes: float = Field(
        default=0.0, ge=0, le=1e15, description="size of the gradient in bytes"
    )
    update_s: Seconds = Field(
        default=0.0,
        description="seconds of one parameter server to update the whole model; several servers "
        "each update a part of it",
    )

    def step_s(self, workers: int) -> float:
        """Return the seconds of one all-reduce; see `Ring`."""
        return Ring(self.latency_s, self._per_s, self.gradient_bytes).all_reduce_s(workers)

    def served_by(self, servers: int) -> ParameterServers:
        return ParameterServers(
            servers, self.latency_s, self._per_s, self.gradient_bytes, self.update_s
        )

    @property
    def _per_s(self) -> float:
        return float("inf") if self.bytes_per_s is None else self.bytes_per_s


class Exchange(Part):
    """The delay from measurements to decisions."""

    every: Length | Literal["leader"] = Field(
        default=1, description="steps between exchanges, or leader for the leader's own cadence"
    )
    lag: Lag = Field(default=1, description="steps from a measured step to its decision")
    cold_lag: Lag | None = Field(
        default=None,
        description="the same for the first exchange of a fleet with any policy, and for "
        "further ones during the policy's opening; equal to `lag` if omitted",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _steps_or_leader(cls, value: Any) -> Any:
        if value != "leader" and not (type(value) is int and 1 <= value <= MOST_STEPS):
            refuse(f"{shown(value)} (allowed: an integer from 1 to {MOST_STEPS:g}, or leader)")
        return value


class Scenario(Part):
    """A cluster, a global batch, and the events by step."""

    name: Name = Field(description="name in tables")
    about: str = Field(default="", description="origin of the scenario")
    global_batch: Samples = Field(description="samples per step over all workers")
    steps: Length = Field(default=500, description="number of simulated steps")
    workers: list[WorkerGroup] = Field(min_length=1, description="the workers, kind by kind")
    communication: Communication = Communication()
    sync: str = Field(default="bsp", description="synchronisation mode: bsp, ssp(staleness=3), ...")
    epoch_samples: Samples | None = Field(
        default=None,
        description="samples of an epoch, at whose end all workers synchronise, and dbs and "
        "omnilearn decide; if omitted, all samples are one epoch, and these two use 100 steps",
    )
    exchange: Exchange = Exchange()
    events: list[Event] = Field(default=[], description="events, in any order")

    def epoch_of(self, step: int) -> int | None:
        """Return the epoch of a step; ``None`` if no length is given."""
        if self.epoch_samples is None:
            return None
        return step * self.global_batch // self.epoch_samples

    @property
    def size(self) -> int:
        return sum(group.count for group in self.workers)

    @property
    def mode(self) -> SyncMode:
        return sync_from_spec(self.sync)

    @field_validator("sync")
    @classmethod
    def _known_mode(cls, value: str) -> str:
        try:
            return str(sync_from_spec(value))
        except ConfigError as error:
            refuse(str(error))

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        check_scenario(self, to_its_end=info.context != MAY_BE_CUT)
        return self


def check_scenario(scenario: Scenario, *, to_its_end: bool = True) -> None:
    """Raise a `PydanticCustomError` that names the first inconsistent field, if any."""
    if scenario.size > MOST_WORKERS:
        refuse(f"{scenario.size} workers are too many (allowed: 1 to {MOST_WORKERS})", "workers")
    for number, event in enumerate(scenario.events):
        place: Place = ("events", number)
        if to_its_end and event.at >= scenario.steps:
            allowed = f"allowed: 0 to {scenario.steps - 1}"
            refuse(f"{event.at} is not a step of the run ({allowed})", *place, "at")
        _check_event(event, scenario, place)
    _check_membership(scenario)
    _check_speeds(scenario)


def _check_event(event: Event, scenario: Scenario, place: Place) -> None:
    size = scenario.size
    who = chosen(event.workers, size)
    if max(who) >= size:
        refuse(f"{max(who)} is not a worker (allowed: 0 to {size - 1})", *place, "workers")
    until = getattr(event, "until", None)
    if until is not None and until <= event.at:
        refuse(f"{until} is not after at (allowed: {event.at + 1} or later)", *place, "until")
    machines = getattr(event, "machines", None)
    if machines is not None and len(machines) != len(who):
        refuse(
            f"{len(machines)} machines for {len(who)} workers (allowed: one per worker)",
            *place,
            "machines",
        )


def there_from_start(scenario: Scenario) -> Mask:
    """Return the workers that are present before any event: all whose first event is not to join.

    Events after the last step count too: a worker that would join then is absent before.
    """
    here = np.ones(scenario.size, dtype=np.bool_)
    for _, event in reversed(_moves(scenario)):
        if isinstance(event, NoticeEvent):
            continue
        here[chosen(event.workers, scenario.size)] = isinstance(event, Leave)
    return here


def _moves(scenario: Scenario) -> list[tuple[int, Leave | Join | NoticeEvent]]:
    """Return the changes of membership by step, each with the index of its event."""
    moves = [
        (n, e) for n, e in enumerate(scenario.events) if isinstance(e, Leave | Join | NoticeEvent)
    ]
    return sorted(moves, key=lambda move: move[1].at)


def _check_membership(scenario: Scenario) -> None:
    here, bounds = there_from_start(scenario), _bounds(scenario)
    noticed = np.zeros_like(here)
    moves = _moves(scenario)
    if not here.any() and moves and moves[0][1].at > 0:
        problem = "no worker is present before, at step 0 (allowed: some of the workers, not all)"
        refuse(problem, "events", moves[0][0], "workers")
    if not moves or moves[0][1].at > 0:
        _check_those(here, bounds, scenario, 0, ("global_batch",))
    for at, together in groupby(moves, key=lambda move: move[1].at):
        place: Place = ()
        for number, event in together:
            place = ("events", number, "workers")
            if isinstance(event, NoticeEvent):
                _notify(here, noticed, event, scenario.size, place)
            else:
                _move(here, event, scenario.size, place)
                noticed[chosen(event.workers, scenario.size)] = False
        serving = here & ~noticed
        _check_those(serving if serving.any() else here, bounds, scenario, at, place)


def _move(here: Mask, event: Leave | Join, size: int, place: Place) -> None:
    who, joins = np.array(chosen(event.workers, size)), isinstance(event, Join)
    wrong = who[here[who] == joins]
    if len(wrong):
        state, fit = ("already present", "absent") if joins else ("absent", "present")
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    here[who] = joins


def _notify(here: Mask, noticed: Mask, event: NoticeEvent, size: int, place: Place) -> None:
    """Record that workers receive a notice, or have it withdrawn, in place."""
    who, notice = np.array(chosen(event.workers, size)), event.kind == "notice"
    wrong = who[~here[who] | (noticed[who] == notice)]
    if len(wrong):
        gone = not here[wrong[0]]
        state = "absent" if gone else "already under notice" if notice else "not under notice"
        fit = "present without a notice" if notice else "under notice"
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    noticed[who] = notice


Bounds = tuple[IntArray, IntArray, IntArray]


def _bounds(scenario: Scenario) -> Bounds:
    """Return the fewest samples, the most samples and the quantum of every worker."""
    batch, counts = scenario.global_batch, [group.count for group in scenario.workers]
    most = [batch if g.max_share is None else min(g.max_share, batch) for g in scenario.workers]
    lower = np.repeat([group.min_share for group in scenario.workers], counts)
    quanta = np.repeat([group.quantum or 1 for group in scenario.workers], counts)
    return lower, np.repeat(most, counts), quanta


def _check_those(here: Mask, bounds: Bounds, scenario: Scenario, step: int, place: Place) -> None:
    """Raise unless the present workers can split the global batch."""
    workers, batch = int(here.sum()), scenario.global_batch
    if not workers:
        refuse(f"no worker is present at step {step} (allowed: at least 1)", *place)
    least, most = (int(bound[here].sum(dtype=np.float64)) for bound in bounds[:2])
    if not least <= batch <= most:
        at_once = "worker" if workers == 1 else f"{workers} workers"
        refuse(
            f"a global batch of {batch} cannot be split over the {at_once} present at step {step} "
            f"(allowed by min_share and max_share: {least} to {most})",
            *place,
        )
    lower, upper, quanta = (bound[here] for bound in bounds)
    try:
        whole_lower(lower, upper, batch, quanta)
    except InfeasibleShares as error:
        refuse(f"at step {step}: {error}", *place)


def _check_speeds(scenario: Scenario) -> None:
    """Raise unless every worker's speed stays within its range when events overlap."""
    turns = []
    for number, event in enumerate(scenario.events):
        if not isinstance(event, Leave | Join | NoticeEvent):
            turns.append((event.at, False, number))
            until = getattr(event, "until", None)
            turns += [] if until is None else [(until, True, number)]
    logs = np.zeros((2, scenario.size))  # of the least and of the greatest possible speed
    for _, together in groupby(sorted(turns), key=lambda turn: turn[0]):
        numbers: list[int] = []
        for _, ends, number in together:
            event = scenario.events[number]
            numbers.append(number)
            who = slice(None) if event.workers == "all" else chosen(event.workers, scenario.size)
            logs[:, who] += (-1 if ends else 1) * np.log(_extremes(event))[:, None]
        _check_range(logs, scenario, numbers)


def _extremes(event: Event) -> tuple[float, float]:
    """Return the least and the greatest multiple of its speed that an event gives a worker."""
    if isinstance(event, SpeedStep):
        return event.speed, event.speed
    if isinstance(event, Walk):
        return event.least_speed, event.most_speed
    speed: float = (
        event.least_speed if isinstance(event, LoadReplay) else getattr(event, "speed", 1.0)
    )
    return min(speed, 1.0), max(speed, 1.0)


def _check_range(logs: FloatArray, scenario: Scenario, numbers: list[int]) -> None:
    """Raise if a worker's speed may be out of range after these events have begun or ended."""
    for worker, log in ((logs[0].argmin(), logs[0].min()), (logs[1].argmax(), logs[1].max())):
        if math.log(SLOWEST) - _ROUNDING <= log <= math.log(FASTEST) + _ROUNDING:
            continue
        events = {n: scenario.events[n] for n in numbers}
        mine = [n for n, event in events.items() if worker in chosen(event.workers, scenario.size)]
        refuse(
            f"with overlapping events the speed of worker {worker} becomes {math.exp(log):g} "
            f"(allowed: {SLOWEST:g} to {FASTEST:g} in total)",
            *("events", mine[-1]),
            "least_speed" if isinstance(events[mine[-1]], LoadReplay) else "speed",
        )


def epochs_of(scenario: Scenario) -> list[int]:
    """Return the samples of each epoch; their sum is that of the scenario's steps in ``bsp``."""
    samples = scenario.steps * scenario.global_batch
    whole, rest = divmod(samples, scenario.epoch_samples or samples)
    return [scenario.epoch_samples or samples] * whole + [rest] * (rest > 0)
