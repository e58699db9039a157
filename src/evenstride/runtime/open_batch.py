"""A global batch that is left open: ``Stride(global_batch="auto", bounds=(64, 1024))``."""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.errors import ConfigError
from evenstride.runtime.checks import check_whole, whole

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of a process.

    Args:
        samples: of a step.
        bounds: between which the run may have had another one before; ``None`` where it may not.
    """

    samples: int
    bounds: tuple[int, int] | None = None


def batch_of(asked: int | str, bounds: tuple[int, int] | None, environment: int | None) -> Batch:
    """Return the batch that a `Stride` trains with.

    Without ``EVENSTRIDE_GLOBAL_BATCH`` an open one is the lower bound, and stays that: a state
    of another one is refused then rather than gone on from with a batch that nobody has chosen.

    Args:
        asked: samples, or ``auto``.
        bounds: smallest and largest, with ``auto``.
        environment: ``EVENSTRIDE_GLOBAL_BATCH``; ``None`` without it.

    Raises:
        ConfigError: both are given, or neither; or the batch is not within the bounds.
    """
    if not isinstance(asked, str) or asked != AUTO:
        if bounds is not None:
            raise ConfigError(
                f"bounds={bounds!r} are those of a global batch that is left open; give them with "
                f'global_batch="auto", or leave them out and keep global_batch={asked!r}'
            )
        return Batch(whole(asked))
    low, high = _checked(bounds)
    samples = low if environment is None else environment
    if not low <= samples <= high:
        raise ConfigError(
            f"EVENSTRIDE_GLOBAL_BATCH is {samples}, which is not within the bounds of this Stride, "
            f"{low} to {high}; set it to a number between them, or widen bounds="
        )
    return Batch(samples, None if environment is None else (low, high))


def _checked(bounds: tuple[int, int] | None) -> tuple[int, int]:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ConfigError(
            f'global_batch="auto" needs bounds, and they are {bounds!r}; give the smallest and the '
            "largest batch that may be chosen, such as bounds=(64, 1024)"
        )
    low, high = map(whole, bounds)
    check_whole("the lower of bounds", low, least=1)
    check_whole("the upper of bounds", high, least=low)
    return low, high
