"""A simulated cluster and what befalls it, as a file describes it.

Names carry their unit; every field that is left out has the default shown here. The JSON
schema of `Scenario` is what ``evenstride simulate --schema`` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerGroup(_Part):
    """Some workers of one kind: ``t(b) = max(floor_s, fixed_s + b / samples_per_s)``."""

    name: str = Field(
        default="worker", description="what they are called; numbered if there are several"
    )
    count: int = Field(default=1, ge=1, le=1_000_000, description="how many of them")
    samples_per_s: Positive = Field(description="samples per second, the fixed time apart")
    fixed_s: NotNegative = Field(default=0.0, description="seconds of a step that no share changes")
    floor_s: NotNegative = Field(default=0.0, description="shortest possible step in seconds")
    saturates_at: int | None = Field(
        default=None, ge=1, description="share above which samples cost more"
    )
    beyond: float = Field(
        default=2.0, ge=1, le=1000, description="how much more each costs beyond it"
    )
    min_share: int = Field(default=1, ge=1, description="fewest samples it takes")
    max_share: int | None = Field(
        default=None, ge=1, description="most samples that fit its memory"
    )
    noise: float = Field(default=0.0, ge=0, le=2, description="log-normal noise of a step's time")
    spike_rate: Fraction = Field(default=0.0, description="part of the steps that are spikes")
    spike_factor: float = Field(
        default=3.0, ge=1, le=1000, description="how much longer a spike takes"
    )
    cores: float | None = Field(
        default=None, gt=0, description="cores it declares, for static policies"
    )
    flops_per_s: float | None = Field(default=None, gt=0, description="FLOP/s it declares")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_share is not None and self.max_share < self.min_share:
            raise ValueError(f"max_share {self.max_share} is below min_share {self.min_share}")
        return self


class Communication(_Part):
    """A ring all-reduce of the gradient, which no split can change."""

    latency_s: NotNegative = Field(default=0.0, description="seconds per message")
    bytes_per_s: Positive | None = Field(
        default=None, description="of the slowest link; none for no limit"
    )
    gradient_bytes: NotNegative = Field(default=0.0, description="size of the gradient")

    def step_s(self, workers: int) -> float:
        """Return the seconds that one all-reduce takes: ``2 (W - 1)`` messages of a W-th each.

        Source:
            The cost model of the ring all-reduce (Patarasuk & Yuan, JPDC 2009).
        """
        messages = 2 * (workers - 1)
        per_s = float("inf") if self.bytes_per_s is None else self.bytes_per_s
        return messages * (self.latency_s + self.gradient_bytes / max(workers, 1) / per_s)


class Exchange(_Part):
    """How soon a decision follows what was measured."""

    every: int | Literal["leader"] = Field(
        default=1, description="steps between exchanges, or the cadence that the leader itself sets"
    )
    lag: int = Field(
        default=1, ge=1, le=10_000, description="steps from a measured step to its decision"
    )
    cold_lag: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="the same in the opening phase; as `lag` if left out",
    )

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.every != "leader" and self.every < 1:
            raise ValueError("every must be at least 1, or leader")
        return self


Who = int | list[int] | Literal["all"]


class _Event(_Part):
    at: Step = Field(description="first step it holds for")
    workers: Who = Field(description="number of a worker, a list of them, or all")


class SpeedStep(_Event):
    """The speed changes at once, to a multiple of the usual one."""

    kind: Literal["step"]
    speed: Positive = Field(description="multiple of the usual speed from then on")
    until: Step | None = Field(default=None, description="step from which it is as usual again")


class Ramp(_Event):
    """The speed changes evenly from the usual one to a multiple of it."""

    kind: Literal["ramp"]
    speed: Positive
    steps: int = Field(ge=1, description="steps it takes")


class Periodic(_Event):
    """The speed goes to and fro."""

    kind: Literal["periodic"]
    speed: Positive
    period: int = Field(ge=2, description="steps from one slow phase to the next")
    duty: Fraction = Field(default=0.5, description="part of the period at that speed")
    until: Step | None = None


class Bursty(_Event):
    """The speed changes at random moments; each worker's own."""

    kind: Literal["bursty"]
    speed: Positive
    mean_steps: Positive = Field(description="mean length of a slow phase in steps")
    mean_gap: Positive = Field(description="mean steps between two of them")
    until: Step | None = None


class Replay(_Event):
    """Background load recorded on real machines takes its part of the processor."""

    kind: Literal["replay"]
    day: Literal["20110303", "20110322", "20110412"] = "20110303"
    machines: list[int] | None = Field(
        default=None, description="rows of the recording, one per worker"
    )
    steps_per_sample: int = Field(
        default=30, ge=1, description="steps that one five-minute sample lasts"
    )
    least_speed: float = Field(
        default=0.1, gt=0, le=1, description="the load never leaves less than this"
    )


class Leave(_Event):
    """Workers leave; the others share the global batch."""

    kind: Literal["leave"]


class Join(_Event):
    """Workers that were not there from the start come in."""

    kind: Literal["join"]


Event = Annotated[
    SpeedStep | Ramp | Periodic | Bursty | Replay | Leave | Join, Field(discriminator="kind")
]


class Scenario(_Part):
    """A cluster, a global batch, and what happens step by step."""

    name: str = Field(description="shown in tables")
    about: str = Field(default="", description="where it comes from")
    global_batch: int = Field(ge=1, description="samples per step over all workers")
    steps: int = Field(default=500, ge=1, le=10_000_000)
    workers: list[WorkerGroup] = Field(min_length=1)
    communication: Communication = Communication()
    exchange: Exchange = Exchange()
    events: list[Event] = []

    @property
    def size(self) -> int:
        """Number of workers there ever are."""
        return sum(group.count for group in self.workers)

    @model_validator(mode="after")
    def _events_fit(self) -> Self:
        for number, event in enumerate(self.events):
            _check_event(f"events[{number}]", event, self)
        return self


def chosen(workers: Who, size: int) -> list[int]:
    """Return the numbers of the workers an event speaks of."""
    match workers:
        case "all":
            return list(range(size))
        case int():
            return [workers]
    return list(workers)


def _check_event(place: str, event: Any, scenario: Scenario) -> None:
    size, last = scenario.size, scenario.steps - 1
    for worker in chosen(event.workers, size):
        if not 0 <= worker < size:
            raise ValueError(f"{place}.workers: {worker} is no worker (allowed: 0 to {size - 1})")
    if event.at > last:
        raise ValueError(f"{place}.at: {event.at} is no step (allowed: 0 to {last})")
    until = getattr(event, "until", None)
    if until is not None and until <= event.at:
        raise ValueError(f"{place}.until: {until} is not after at ({event.at})")
    machines = getattr(event, "machines", None)
    if machines is not None and len(machines) != len(chosen(event.workers, size)):
        raise ValueError(f"{place}.machines: give one for each of the event's workers")
