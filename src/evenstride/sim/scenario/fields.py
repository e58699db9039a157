"""What all parts of a scenario have in common: their base, and the limits of their numbers."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

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

    Args:
        problem: what is wrong and what is allowed.
        place: where, below the part that is being checked; that part itself if left out.
    """
    raise PydanticCustomError(REFUSED, "{problem}", {"problem": problem, "place": place})


def shown(value: Any) -> str:
    """Return a value as errors show it: in short, however much is in it."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring = 3, _LONGEST
    text = brief.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def said(source: str, line: int | None, place: Place, problem: str) -> str:
    """Return a complaint about a field: file, line if it is known, field, problem."""
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    where = source if line is None else f"{source}:{line}"
    return f"{where}: {field + ': ' if field else ''}{problem}"


def _seen(name: str) -> str:
    if not name.isprintable():
        refuse(f"{shown(name)} (allowed: a text in one line, of characters that can be seen)")
    return name


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_seen)]
"""What tables show, so nothing that would break their lines."""
