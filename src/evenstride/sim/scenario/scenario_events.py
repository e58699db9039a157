"""The events of a scenario, and the types of the fields of all its parts.

Units and defaults are as in `scenario_model`, which reads a whole scenario.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

Place = tuple[int | str, ...]
"""Keys and indices of the path to a field."""

REFUSED = "refused"

_LONGEST = 60  # characters of an invalid value to show

MOST_WORKERS, MOST_SAMPLES, MOST_STEPS = 1_000_000, 10**12, 10_000_000
SLOWEST, FASTEST = 1e-6, 1e6

# The limits are far from any real machine, and close enough to 1 that nothing overflows.
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
    """Raise an error that pydantic turns into a message about a field.

    The place is relative to the part that is being checked; that part itself if omitted.
    """
    raise PydanticCustomError(REFUSED, "{problem}", {"problem": problem, "place": place})


def shown(value: Any) -> str:
    """Return a value as errors show it: shortened, whatever its size."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring = 3, _LONGEST
    text = brief.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _seen(name: str) -> str:
    if not name.isprintable():
        refuse(f"{shown(name)} (allowed: one line of printable characters)")
    return name


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_seen)]
"""A text for tables, which must not break their lines."""


Who = Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"]


_OVERLAP = "factors of overlapping events are multiplied"


class _Event(Part):
    at: Step = Field(description="first step at which it applies")
    workers: Who = Field(description="number of a worker, a list of numbers, or all")

    @field_validator("workers", mode="before")
    @classmethod
    def _numbers_or_all(cls, value: Any) -> Any:
        numbers = value if isinstance(value, list) else [value]
        known = numbers and all(type(number) is int and number >= 0 for number in numbers)
        if value != "all" and not known:
            refuse(f"{shown(value)} (allowed: the number of a worker, from 0; a list; or all)")
        if len(set(numbers)) < len(numbers):
            refuse(f"{shown(value)} names a worker twice (allowed: each once)")
        return value


class SpeedStep(_Event):
    """The speed changes at once, to a multiple of the usual speed."""

    kind: Literal["step"]
    speed: Speed = Field(description=f"multiple of the usual speed from at to until; {_OVERLAP}")
    until: Step | None = Field(default=None, description="step at which the usual speed returns")


class Ramp(_Event):
    """The speed changes linearly from the usual speed to a multiple of it."""

    kind: Literal["ramp"]
    speed: Speed = Field(
        description=f"multiple of the usual speed at the end of the ramp and later; {_OVERLAP}"
    )
    steps: Length = Field(description="length of the ramp in steps")


Phases = Literal["common", "separate"]


class Periodic(_Event):
    """The speed alternates between a slow phase and the usual speed."""

    kind: Literal["periodic"]
    speed: Speed = Field(description=f"multiple of the usual speed in a slow phase; {_OVERLAP}")
    period: int = Field(ge=2, le=MOST_STEPS, description="steps from one slow phase to the next")
    duty: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="fraction of the period in the slow phase, at least one step"
    )
    phases: Phases = Field(
        default="common",
        description="common: slow at the same steps, from at on; separate: each worker is at a "
        "random point of its period at that step",
    )
    until: Step | None = Field(default=None, description="step at which the usual speed returns")


class Wave(_Event):
    """The speed changes smoothly to a multiple of the usual speed and back, as with temperature."""

    kind: Literal["wave"]
    speed: Speed = Field(
        description=f"multiple of the usual speed at the turning point of each wave; {_OVERLAP}"
    )
    period: int = Field(ge=2, le=MOST_STEPS, description="length of a wave in steps")
    phases: Phases = Field(
        default="common",
        description="common: all begin a wave at the same step; separate: each worker is at a "
        "random point of its wave at that step",
    )
    until: Step | None = Field(default=None, description="step at which the usual speed returns")


class Walk(_Event):
    """The speed drifts at random: its logarithm is a random walk between two bounds."""

    kind: Literal["walk"]
    spread: float = Field(
        gt=0, le=1, description="standard deviation of the change in one step: 0.02 is 2 %"
    )
    least_speed: float = Field(
        default=0.25, ge=SLOWEST, le=1, description=f"least multiple of the usual speed; {_OVERLAP}"
    )
    most_speed: float = Field(
        default=4.0, ge=1, le=FASTEST, description=f"greatest multiple; {_OVERLAP}"
    )
    phases: Phases = Field(
        default="separate",
        description="separate: independently for each worker; common: the same walk for all",
    )
    until: Step | None = Field(default=None, description="step at which the usual speed returns")


class Bursty(_Event):
    """The speed changes at random times."""

    kind: Literal["bursty"]
    speed: Speed = Field(description=f"multiple of the usual speed in a slow phase; {_OVERLAP}")
    mean_steps: float = Field(
        ge=1, le=MOST_STEPS, description="mean length of a slow phase in steps"
    )
    mean_gap: float = Field(ge=1, le=MOST_STEPS, description="mean steps between two slow phases")
    phases: Phases = Field(
        default="separate",
        description="separate: independently for each worker; common: all at the same steps",
    )
    until: Step | None = Field(default=None, description="step at which the usual speed returns")


class LoadReplay(_Event):
    """Background load, recorded on real machines, uses part of the processor."""

    kind: Literal["replay"]
    day: Literal["20110303", "20110322", "20110412"] = Field(
        default="20110303", description="day of the recording"
    )
    machines: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="rows of the recording, one per worker; random if omitted",
    )
    steps_per_sample: Length = Field(
        default=30, description="number of steps per five-minute sample"
    )
    least_speed: float = Field(
        default=0.1,
        ge=1e-6,
        le=1,
        description=f"smallest multiple of the usual speed that the load leaves; {_OVERLAP}",
    )

    @field_validator("day", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value


class Leave(_Event):
    """Workers leave or are lost; the others take over the global batch."""

    kind: Literal["leave", "lost"]


class NoticeEvent(_Event):
    """Workers receive a preemption notice, or have it withdrawn.

    In between they get no samples, but take part in every step; `leave` removes them.
    """

    kind: Literal["notice", "withdrawn"]


class Join(_Event):
    """Workers join; workers whose first event this is are absent at the start."""

    kind: Literal["join"]


Event = Annotated[
    SpeedStep | Ramp | Periodic | Wave | Walk | Bursty | LoadReplay | Leave | Join | NoticeEvent,
    Field(discriminator="kind"),
]


def chosen(workers: Who, size: int) -> list[int]:
    match workers:
        case "all":
            return list(range(size))
        case int():
            return [workers]
    return list(workers)
