"""A simulated cluster and what befalls it, as a file describes it.

Names carry their unit; every field that is left out has the default shown here. The JSON
schema of `Scenario` is what ``evenstride simulate --schema`` prints.
"""

from __future__ import annotations

import math
import reprlib
from itertools import groupby
from typing import Annotated, Any, Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from evenstride.core.fleet import FloatArray, IntArray
from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.errors import ConfigError
from evenstride.sim.engine.network import ParameterServers, Ring

Place = tuple[int | str, ...]
"""Keys and indices that lead to a field."""

REFUSED = "refused"

_LONGEST = 60  # characters of a wrong value that are shown

MOST_WORKERS, MOST_SAMPLES, MOST_STEPS = 1_000_000, 10**12, 10_000_000
SLOWEST, FASTEST = 1e-6, 1e6

# The limits are far from any real machine, and near enough to 1 that nothing overflows.
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
Resource = Annotated[float, Field(ge=1e-6, le=1e24)]
Speed = Annotated[float, Field(ge=SLOWEST, le=FASTEST)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Lag = Annotated[int, Field(ge=1, le=10_000)]
Step = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Length = Annotated[int, Field(ge=1, le=MOST_STEPS)]


class Part(BaseModel):
    # Strict: a number in quotes is a text, and true is not 1.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def refuse(problem: str, *place: int | str) -> NoReturn:
    """Raise what pydantic turns into a complaint about a field.

    The place is below the part that is being checked; that part itself if left out.
    """
    raise PydanticCustomError(REFUSED, "{problem}", {"problem": problem, "place": place})


def shown(value: Any) -> str:
    """Return a value as errors show it: in short, however much is in it."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring = 3, _LONGEST
    text = brief.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _seen(name: str) -> str:
    if not name.isprintable():
        refuse(f"{shown(name)} (allowed: a text in one line, of characters that can be seen)")
    return name


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_seen)]
"""What tables show, so nothing that would break their lines."""


Who = Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"]


_OVERLAP = "of events that overlap, the multiples are multiplied"


class _Event(Part):
    at: Step = Field(description="first step it holds for")
    workers: Who = Field(description="number of a worker, a list of them, or all")

    @field_validator("workers", mode="before")
    @classmethod
    def _numbers_or_all(cls, value: Any) -> Any:
        numbers = value if isinstance(value, list) else [value]
        known = numbers and all(type(number) is int and number >= 0 for number in numbers)
        if value != "all" and not known:
            refuse(f"{shown(value)} (allowed: the number of a worker, from 0 on; a list; or all)")
        if len(set(numbers)) < len(numbers):
            refuse(f"{shown(value)} names a worker twice (allowed: each once)")
        return value


class SpeedStep(_Event):
    """The speed changes at once, to a multiple of the usual one."""

    kind: Literal["step"]
    speed: Speed = Field(
        description=f"multiple of the usual speed from then on, up to until; {_OVERLAP}"
    )
    until: Step | None = Field(default=None, description="step from which it is as usual again")


class Ramp(_Event):
    """The speed changes evenly from the usual one to a multiple of it."""

    kind: Literal["ramp"]
    speed: Speed = Field(
        description=f"multiple of the usual speed at its end, and from then on; {_OVERLAP}"
    )
    steps: Length = Field(description="steps it takes")


class Periodic(_Event):
    """The speed goes to and fro."""

    kind: Literal["periodic"]
    speed: Speed = Field(description=f"multiple of the usual speed in a slow phase; {_OVERLAP}")
    period: int = Field(ge=2, le=MOST_STEPS, description="steps from one slow phase to the next")
    duty: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="part of the period at that speed, at least one step of it"
    )
    until: Step | None = Field(default=None, description="step from which it is as usual again")


class Bursty(_Event):
    """The speed changes at random moments; each worker's own."""

    kind: Literal["bursty"]
    speed: Speed = Field(description=f"multiple of the usual speed in a slow phase; {_OVERLAP}")
    mean_steps: float = Field(
        ge=1, le=MOST_STEPS, description="mean length of a slow phase in steps"
    )
    mean_gap: float = Field(ge=1, le=MOST_STEPS, description="mean steps between two of them")
    until: Step | None = Field(default=None, description="step from which it is as usual again")


class LoadReplay(_Event):
    """Background load recorded on real machines takes its part of the processor."""

    kind: Literal["replay"]
    day: Literal["20110303", "20110322", "20110412"] = Field(
        default="20110303", description="day of the recording"
    )
    machines: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="rows of the recording, one per worker; a random choice if left out",
    )
    steps_per_sample: Length = Field(
        default=30, description="steps that one five-minute sample lasts"
    )
    least_speed: float = Field(
        default=0.1,
        ge=1e-6,
        le=1,
        description=f"the load never leaves less than this multiple of the usual speed; {_OVERLAP}",
    )

    @field_validator("day", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value


class Leave(_Event):
    """Workers leave or are lost; the others share the global batch."""

    kind: Literal["leave", "lost"]


class NoticeEvent(_Event):
    """Workers are told that they will be taken away, or that they will not be after all.

    They get no samples in between, and still take part in every step; `leave` takes them away.
    """

    kind: Literal["notice", "withdrawn"]


class Join(_Event):
    """Workers come in; those whose first event it is were not there from the start."""

    kind: Literal["join"]


Event = Annotated[
    SpeedStep | Ramp | Periodic | Bursty | LoadReplay | Leave | Join | NoticeEvent,
    Field(discriminator="kind"),
]


def chosen(workers: Who, size: int) -> list[int]:
    match workers:
        case "all":
            return list(range(size))
        case int():
            return [workers]
    return list(workers)


Mask = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # of sums of logarithms

MAY_BE_CUT = {"may be cut": True}
"""Context of a validation in which events may lie after the last step, and never happen."""


class WorkerGroup(Part):
    """Some workers of one kind: ``t(b) = max(floor_s, fixed_s + b / samples_per_s)``."""

    name: Name = Field(
        default="worker", description="what they are called; numbered if there are several"
    )
    count: int = Field(default=1, ge=1, le=MOST_WORKERS, description="how many of them")
    samples_per_s: Rate = Field(
        description="samples per second, the fixed time apart: 2000, not 2,000"
    )
    fixed_s: Seconds = Field(
        default=0.0, description="seconds of a step that no share changes: 0.02 is 20 ms"
    )
    floor_s: Seconds = Field(
        default=0.0, description="shortest possible step in seconds: 0.02 is 20 ms"
    )
    saturates_at: Samples | None = Field(
        default=None,
        description="share in samples above which samples cost more; never if left out",
    )
    beyond: float = Field(
        default=2.0,
        ge=1,
        le=1000,
        description="factor by which each sample beyond saturates_at costs more",
    )
    min_share: Samples = Field(default=1, description="fewest samples in a step")
    max_share: Samples | None = Field(
        default=None,
        description="most samples in a step, such as fit its memory; no limit if left out",
    )
    noise: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="standard deviation of the logarithm of a step's time: 0.02 is 2 %",
    )
    spike_rate: Fraction = Field(
        default=0.0, description="part of the steps that are spikes: 0.01 is one in a hundred"
    )
    spike_factor: float = Field(
        default=3.0, ge=1, le=1000, description="factor by which a spike lengthens a step"
    )
    new_share_s: Seconds = Field(
        default=0.0,
        description="seconds that a worker's first step at each new share takes longer, as "
        "compilers and autotuners make it: 0.5 is half a second",
    )
    handling_s: Seconds = Field(
        default=0.0,
        description="seconds of its own, to pack and unpack, for each update with parameter "
        "servers: 0.02 is 20 ms",
    )
    cores: Resource | None = Field(
        default=None, description="number of cores it declares, for static policies"
    )
    flops_per_s: Resource | None = Field(
        default=None, description="FLOP/s it declares, for static policies: 8.1e12 is 8.1 TFLOP/s"
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
    """The links between the workers, and to parameter servers; no split can change what they do."""

    latency_s: Seconds = Field(default=0.0, description="seconds per message: 0.0001 is 0.1 ms")
    bytes_per_s: Annotated[float, Field(ge=1, le=1e18)] | None = Field(
        default=None, description="bytes per second of the slowest link; no limit if left out"
    )
    gradient_bytes: float = Field(
        default=0.0, ge=0, le=1e15, description="size of the gradient in bytes"
    )
    update_s: Seconds = Field(
        default=0.0,
        description="seconds that one parameter server alone would take for an update of the whole "
        "model; each of several takes its part of it",
    )

    def step_s(self, workers: int) -> float:
        """Return the seconds that one all-reduce takes; see `Ring`."""
        return Ring(self.latency_s, self._per_s, self.gradient_bytes).all_reduce_s(workers)

    def served_by(self, servers: int) -> ParameterServers:
        return ParameterServers(
            servers, self.latency_s, self._per_s, self.gradient_bytes, self.update_s
        )

    @property
    def _per_s(self) -> float:
        return float("inf") if self.bytes_per_s is None else self.bytes_per_s


class Exchange(Part):
    """How soon a decision follows what was measured."""

    every: Length | Literal["leader"] = Field(
        default=1, description="steps between exchanges, or the cadence that the leader itself sets"
    )
    lag: Lag = Field(default=1, description="steps from a measured step to its decision")
    cold_lag: Lag | None = Field(
        default=None,
        description="the same for the first exchange of a fleet, whatever the policy, and for "
        "further ones as long as the policy's opening lasts; as `lag` if left out",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _steps_or_leader(cls, value: Any) -> Any:
        if value != "leader" and not (type(value) is int and 1 <= value <= MOST_STEPS):
            refuse(f"{shown(value)} (allowed: a whole number from 1 to {MOST_STEPS:g}, or leader)")
        return value


class Scenario(Part):
    """A cluster, a global batch, and what happens step by step."""

    name: Name = Field(description="shown in tables")
    about: str = Field(default="", description="where it comes from")
    global_batch: Samples = Field(description="samples per step over all workers")
    steps: Length = Field(default=500, description="steps that are simulated")
    workers: list[WorkerGroup] = Field(min_length=1, description="the workers, kind by kind")
    communication: Communication = Communication()
    sync: str = Field(
        default="bsp", description="how workers come together: bsp, ssp(staleness=3), ..."
    )
    epoch_samples: Samples | None = Field(
        default=None,
        description="samples of an epoch, at whose end all wait for each other, and dbs and "
        "omnilearn decide; if left out all that are trained, and these two take 100 steps for one",
    )
    exchange: Exchange = Exchange()
    events: list[Event] = Field(default=[], description="what happens, in any order")

    def epoch_of(self, step: int) -> int | None:
        """Return the epoch that a step belongs to; ``None`` where no length is given."""
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
    """Raise a `PydanticCustomError` that names a field that does not fit, unless all do."""
    if scenario.size > MOST_WORKERS:
        refuse(f"{scenario.size} workers are too many (allowed: 1 to {MOST_WORKERS})", "workers")
    for number, event in enumerate(scenario.events):
        place: Place = ("events", number)
        if to_its_end and event.at >= scenario.steps:
            allowed = f"allowed: 0 to {scenario.steps - 1}"
            refuse(f"{event.at} is no step ({allowed})", *place, "at")
        _check_event(event, scenario, place)
    _check_membership(scenario)
    _check_speeds(scenario)


def _check_event(event: Event, scenario: Scenario, place: Place) -> None:
    size = scenario.size
    who = chosen(event.workers, size)
    if max(who) >= size:
        refuse(f"{max(who)} is no worker (allowed: 0 to {size - 1})", *place, "workers")
    until = getattr(event, "until", None)
    if until is not None and until <= event.at:
        refuse(f"{until} is not after at (allowed: {event.at + 1} or later)", *place, "until")
    machines = getattr(event, "machines", None)
    if machines is not None and len(machines) != len(who):
        refuse(
            f"{len(machines)} machines for {len(who)} workers (allowed: one for each)",
            *place,
            "machines",
        )


def there_from_start(scenario: Scenario) -> Mask:
    """Return who is there before any event: all but those whose first event is to join.

    Events after the last step count too: who would only have joined then was not there before.
    """
    here = np.ones(scenario.size, dtype=np.bool_)
    for _, event in reversed(_moves(scenario)):
        if isinstance(event, NoticeEvent):
            continue
        here[chosen(event.workers, scenario.size)] = isinstance(event, Leave)
    return here


def _moves(scenario: Scenario) -> list[tuple[int, Leave | Join | NoticeEvent]]:
    """Return the changes of membership by step, each with its number among the events."""
    moves = [
        (n, e) for n, e in enumerate(scenario.events) if isinstance(e, Leave | Join | NoticeEvent)
    ]
    return sorted(moves, key=lambda move: move[1].at)


def _check_membership(scenario: Scenario) -> None:
    here, bounds = there_from_start(scenario), _bounds(scenario)
    told = np.zeros_like(here)
    moves = _moves(scenario)
    if not here.any() and moves and moves[0][1].at > 0:
        problem = "nobody is there before them, at step 0 (allowed: some of the workers, not all)"
        refuse(problem, "events", moves[0][0], "workers")
    if not moves or moves[0][1].at > 0:
        _check_those(here, bounds, scenario, 0, ("global_batch",))
    for at, together in groupby(moves, key=lambda move: move[1].at):
        place: Place = ()
        for number, event in together:
            place = ("events", number, "workers")
            if isinstance(event, NoticeEvent):
                _tell(here, told, event, scenario.size, place)
            else:
                _move(here, event, scenario.size, place)
                told[chosen(event.workers, scenario.size)] = False
        serving = here & ~told
        _check_those(serving if serving.any() else here, bounds, scenario, at, place)


def _move(here: Mask, event: Leave | Join, size: int, place: Place) -> None:
    who, joins = np.array(chosen(event.workers, size)), isinstance(event, Join)
    wrong = who[here[who] == joins]
    if len(wrong):
        state, fit = ("there already", "not there") if joins else ("not there", "there")
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    here[who] = joins


def _tell(here: Mask, told: Mask, event: NoticeEvent, size: int, place: Place) -> None:
    """Let workers know that they will be taken away, or that they will not, in place."""
    who, notice = np.array(chosen(event.workers, size)), event.kind == "notice"
    wrong = who[~here[who] | (told[who] == notice)]
    if len(wrong):
        gone = not here[wrong[0]]
        state = "not there" if gone else "told so already" if notice else "not about to leave"
        fit = "there and not told" if notice else "told to leave"
        problem = f"worker {wrong[0]} is {state} at step {event.at}"
        refuse(f"{problem} (allowed: workers that are {fit} then)", *place)
    told[who] = notice


def _bounds(scenario: Scenario) -> tuple[IntArray, IntArray]:
    """Return the fewest and the most samples of every worker."""
    batch, counts = scenario.global_batch, [group.count for group in scenario.workers]
    most = [batch if g.max_share is None else min(g.max_share, batch) for g in scenario.workers]
    lower = np.repeat([group.min_share for group in scenario.workers], counts)
    return lower, np.repeat(most, counts)


def _check_those(
    here: Mask, bounds: tuple[IntArray, IntArray], scenario: Scenario, step: int, place: Place
) -> None:
    """Raise unless those who are there can share the global batch."""
    workers, batch = int(here.sum()), scenario.global_batch
    if not workers:
        refuse(f"no worker is there at step {step} (allowed: at least 1)", *place)
    least, most = (int(bound[here].sum(dtype=np.float64)) for bound in bounds)
    if not least <= batch <= most:
        at_once = "worker" if workers == 1 else f"{workers} workers"
        refuse(
            f"a global batch of {batch} cannot be shared by the {at_once} there at step {step} "
            f"(allowed by min_share and max_share: {least} to {most})",
            *place,
        )


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
    speed: float = (
        event.least_speed if isinstance(event, LoadReplay) else getattr(event, "speed", 1.0)
    )
    return min(speed, 1.0), max(speed, 1.0)


def _check_range(logs: FloatArray, scenario: Scenario, numbers: list[int]) -> None:
    """Raise if a worker's speed may be out of range once these events have begun or ended."""
    for worker, log in ((logs[0].argmin(), logs[0].min()), (logs[1].argmax(), logs[1].max())):
        if math.log(SLOWEST) - _ROUNDING <= log <= math.log(FASTEST) + _ROUNDING:
            continue
        events = {n: scenario.events[n] for n in numbers}
        mine = [n for n, event in events.items() if worker in chosen(event.workers, scenario.size)]
        refuse(
            f"with the events at the same time the speed of worker {worker} comes to "
            f"{math.exp(log):g} (allowed: {SLOWEST:g} to {FASTEST:g} in all)",
            *("events", mine[-1]),
            "least_speed" if isinstance(events[mine[-1]], LoadReplay) else "speed",
        )


def epochs_of(scenario: Scenario) -> list[int]:
    """Return the samples of each epoch: as many in all as the scenario's steps train in ``bsp``."""
    samples = scenario.steps * scenario.global_batch
    whole, rest = divmod(samples, scenario.epoch_samples or samples)
    return [scenario.epoch_samples or samples] * whole + [rest] * (rest > 0)
