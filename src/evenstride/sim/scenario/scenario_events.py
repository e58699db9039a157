"""What may befall the workers of a scenario."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from evenstride.sim.scenario.fields import MOST_STEPS, Length, Part, Speed, Step, refuse, shown

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
    """Return the numbers of the workers an event speaks of."""
    match workers:
        case "all":
            return list(range(size))
        case int():
            return [workers]
    return list(workers)
