"""What a manifest may hold: the type and the range of every value.

A digest tells damage, not forgery: a manifest with a fitting digest can hold anything. It is
checked here as a whole before anything in it is used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenstride.runtime.checkpoint.checkpoint_errors import CheckpointDamaged

_MOST = 2**62
_FILE = r"^(metadata\.json|tensors-[0-9]{5,9}\.bin|items-[0-9]{5,9}\.jsonl)$"

Natural = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Pair = Annotated[list[Natural], Field(min_length=2, max_length=2)]


class _Schema(BaseModel):
    """Types are taken exactly; what a later version adds is passed over."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class FileSchema(_Schema):
    """A file's size and digest."""

    size_bytes: Natural
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class DealingSchema(_Schema):
    """What is left of an epoch of data in shards."""

    begun: Natural
    rest: list[Pair]
    open: list[list[Pair]]


class PositionSchema(_Schema):
    """The state of a `Stride`."""

    version: int
    seed: int
    epoch: Natural
    position: Natural
    step: Natural
    global_batch: Positive
    length: Natural | None
    shuffle: bool
    drop_last: bool
    by_epoch: bool
    parts: list[Natural]
    shards: str
    left: DealingSchema | None
    batches: list[Pair] = []

    @model_validator(mode="after")
    def _is_within_the_data(self) -> Self:
        if self.position > (self.length or 0):
            raise ValueError(f"position {self.position} of {self.length} samples")
        if not all(samples for _, samples in self.batches):
            raise ValueError("a global batch of 0 samples")
        if self.left is not None:
            opened = (stretch for lanes in self.left.open for stretch in lanes)
            stretches = sorted(s for s in (*self.left.rest, *opened) if s[0] != s[1])
            ends = [0, *(end for stretch in stretches for end in stretch), self.length or 0]
            if any(before > after for before, after in pairwise(ends)):
                raise ValueError("what is left of the shards overlaps, or is not in the data")
        return self


class DataSchema(_Schema):
    """What the data set is like."""

    kind: str = ""
    length: Natural = 0
    samples: str = ""


class ProfileSchema(_Schema):
    """What is remembered of one worker."""

    host: str
    device: str
    slot: Natural | None
    name: str
    curve: Annotated[list[float], Field(min_length=5, max_length=5)]
    noise: float
    steps: Natural


class LossesSchema(_Schema):
    """How many workers were lost so far, and how many were expected to be."""

    failures: Natural
    expected: Annotated[float, Field(ge=0)]


class WorkersSchema(_Schema):
    """What is remembered of all workers."""

    generation: Natural = 0
    profiles: list[ProfileSchema] = []
    losses: LossesSchema | None = None
    parting: bool = False


class ManifestSchema(_Schema):
    """All of a manifest."""

    format: int
    step: Natural
    created_unix_s: float
    world_size: Positive
    versions: dict[str, str]
    stride: PositionSchema
    data: DataSchema
    workers: WorkersSchema
    files: dict[Annotated[str, Field(pattern=_FILE)], FileSchema]
    earlier: list[str] = []
    run: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""

    @model_validator(mode="after")
    def _has_two_files_for_each_rank(self) -> Self:
        if len(self.files) > 2 * self.world_size + 1:
            raise ValueError(f"{len(self.files)} files of {self.world_size} ranks")
        return self


def check_plain(plain: Any) -> None:
    """Check the content of a manifest, as JSON types.

    Raises:
        CheckpointDamaged: names the first value that no evenstride writes.
    """
    try:
        ManifestSchema.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "all of it"
        raise CheckpointDamaged(
            f"its manifest has an impossible value: {where}: {first['msg'][:80]}"
        ) from None
