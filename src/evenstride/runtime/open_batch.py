"""A global batch that is left open: ``Stride(global_batch="auto", bounds=(64, 1024))``."""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.errors import ConfigError
from evenstride.runtime.checks import check_whole, whole

AUTO = "auto"


USUAL_EVERY = 10
"""Steps from one whose gradient's noise is measured to the next, where the batch follows it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of a process.

    Args:
        samples: of a step; of one that is chosen while it trains, those of the first epoch.
        bounds: between which the run may have had another one before; ``None`` where it may not.
        chosen: whether it is chosen anew where an epoch ends.
    """

    samples: int
    bounds: tuple[int, int] | None = None
    chosen: bool = False


def batch_of(
    asked: int | str,
    bounds: tuple[int, int] | None,
    environment: int | None,
    *,
    averages: bool = True,
) -> Batch:
    """Return the batch that a `Stride` trains with.

    An open one is what ``EVENSTRIDE_GLOBAL_BATCH`` says, if that is set: somebody else chooses it,
    from start to start. Else it begins with the lower bound and is chosen at the end of each
    epoch. Where the gradients of a step are not averaged, their noise cannot be told, and it stays
    the lower bound; a state of another one is refused then.

    Args:
        asked: samples, or ``auto``.
        bounds: smallest and largest, with ``auto``.
        environment: ``EVENSTRIDE_GLOBAL_BATCH``; ``None`` without it, 0 for the lower bound.
        averages: whether the mode of synchronisation averages the gradients of each step.

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
    if environment is None:
        return Batch(low, (low, high), chosen=True) if averages else Batch(low)
    environment = environment or low
    if not low <= environment <= high:
        raise ConfigError(
            f"EVENSTRIDE_GLOBAL_BATCH is {environment}, which is not within the bounds of this "
            f"Stride, {low} to {high}; set it to a number between them, or widen bounds="
        )
    return Batch(environment, (low, high))


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
