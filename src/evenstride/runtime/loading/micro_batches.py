"""Batches on their way to the training loop, split into micro-batches and handed out again."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from evenstride.core.sampling.draw import Draw
from evenstride.core.sampling.partition import micro_batches
from evenstride.errors import ConfigError
from evenstride.runtime.loading.seeding import Keys


class Retry(enum.Enum):
    """What comes again because a batch did not fit into memory."""

    NO = 0
    BATCH = 1
    STEP = 2

    def __bool__(self) -> bool:
        return self is not Retry.NO


# Rounding of a sum of weights.
_ALIKE = 1e-6


class LoadedBatch(NamedTuple):
    """A loaded batch.

    Args:
        batch: what the training loop gets.
        draw: which step and samples it is of.
        keys: of its samples in the data set.
        weight: from the weight function; ``None`` counts samples.
    """

    batch: Any
    draw: Draw
    keys: Keys
    weight: float | None


def smaller(draw: Draw, keys: Keys, at_most: int) -> Iterator[tuple[Draw, Keys]]:
    """Yield the same samples in the fewest batches of at most ``at_most``, sizes alike."""
    parts = micro_batches(range(len(keys)), at_most)
    for number, part in enumerate(parts):
        piece = draw._replace(
            samples=len(part),
            first=draw.first and number == 0,
            last=draw.last and number == len(parts) - 1,
        )
        yield piece, keys[part.start : part.stop]


def merge(items: list[LoadedBatch]) -> LoadedBatch:
    """Return the consecutive batches of a step as one, without what was loaded."""
    draw = items[-1].draw._replace(samples=sum(item.draw.samples for item in items), first=True)
    weights = [item.weight for item in items if item.weight is not None]
    keys: list[Any] = [key for item in items for key in item.keys]
    return LoadedBatch(None, draw, keys, sum(weights) if weights else None)


def check_weights(whole: LoadedBatch, pieces: list[LoadedBatch]) -> None:
    """Raise unless the weights of the pieces add up to that of the whole.

    The sum over all ranks was exchanged before the batch was cut.

    Raises:
        ConfigError: the weight function is no sum over samples.
    """
    if whole.weight is None:
        return
    total = sum(piece.weight or 0.0 for piece in pieces)
    if not math.isclose(total, whole.weight, rel_tol=_ALIKE):
        raise ConfigError(
            f"weight_fn gave {whole.weight:g} for a batch of {whole.draw.samples} samples, and "
            f"{total:g} for its {len(pieces)} pieces together; a batch that does not fit into "
            "memory is trained in pieces, so the weight must be a sum over samples (tokens, say)"
        )
