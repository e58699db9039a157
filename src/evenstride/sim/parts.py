"""What all parts of a scenario have in common: their base, and the limits of their numbers."""

from __future__ import annotations

from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Place = tuple[int | str, ...]
"""Keys and indices that lead to a field."""

REFUSED = "refused"

MOST_WORKERS, MOST_SAMPLES, MOST_STEPS = 1_000_000, 10**12, 10_000_000

# The limits are far from any real machine, and near enough to 1 that nothing overflows.
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
Resource = Annotated[float, Field(ge=1e-6, le=1e24)]
Speed = Annotated[float, Field(ge=1e-6, le=1e6)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Lag = Annotated[int, Field(ge=1, le=10_000)]
Step = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Length = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def refuse(problem: str, *place: int | str) -> NoReturn:
    """Raise what pydantic turns into a complaint about a field.

    Args:
        problem: what is wrong and what is allowed.
        place: where, below the part that is being checked; that part itself if left out.
    """
    raise PydanticCustomError(REFUSED, "{problem}", {"problem": problem, "place": place})
