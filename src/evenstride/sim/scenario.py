"""A simulated cluster and what befalls it, as a file describes it.

Names carry their unit; every field that is left out has the default shown here. The JSON
schema of `Scenario` is what ``evenstride simulate --schema`` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from evenstride.core.sync import SyncMode, sync_from_spec
from evenstride.errors import ConfigError
from evenstride.sim.events import (
    Bursty,
    Event,
    Join,
    Leave,
    Notice,
    Periodic,
    Ramp,
    Replay,
    SpeedStep,
    Who,
    chosen,
)
from evenstride.sim.fitting import check_scenario
from evenstride.sim.links import ParameterServers, Ring
from evenstride.sim.parts import (
    MOST_STEPS,
    MOST_WORKERS,
    Fraction,
    Lag,
    Length,
    Name,
    Part,
    Rate,
    Resource,
    Samples,
    Seconds,
    refuse,
    shown,
)

__all__ = [
    "MAY_BE_CUT",
    "Bursty",
    "Communication",
    "Event",
    "Exchange",
    "Join",
    "Leave",
    "Notice",
    "Periodic",
    "Ramp",
    "Replay",
    "Scenario",
    "SpeedStep",
    "Who",
    "WorkerGroup",
    "chosen",
]


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
        """Return so many parameter servers at the end of these links."""
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
        """Number of workers there ever are."""
        return sum(group.count for group in self.workers)

    @property
    def mode(self) -> SyncMode:
        """How its workers come together."""
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
